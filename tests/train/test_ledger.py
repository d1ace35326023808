"""The ledger under scripted and random schedules of events."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.train.config import GrpoConfig, RedundancyConfig, TrainConfig
from tasks.train.ledger import (
    HELD_OUT_SEEDS_FROM,
    Batch,
    Cancel,
    Instruction,
    Ledger,
    NoSignal,
    Start,
    TooManyFailures,
)
from tasks.trajectory import (
    InfraError,
    MemberSpec,
    Reward,
    Skip,
    StopReason,
    TrajectoryHeader,
    TrajectoryKey,
)
from tests.builders import header_for


def make_ledger(
    *,
    weights: dict[str, float] | None = None,
    mode: str = "tutti",
    alpha: int = 1,
    groups: int = 2,
    group_size: int = 2,
    redundancy: RedundancyConfig | None = None,
    algorithm: GrpoConfig | None = None,
    attempts: int = 2,
    failure_budget: int = 10**6,
    steps: int = 50,
) -> Ledger:
    train = TrainConfig(
        mode=mode,
        alpha=alpha,
        groups=groups,
        group_size=group_size,
        steps=steps,
        redundancy=redundancy or RedundancyConfig(),
        algorithm=algorithm or GrpoConfig(zero_variance="keep"),
    )
    return Ledger(
        weights=weights or {"a": 1.0},
        train=train,
        seed=3,
        temperature=1.0,
        attempts=attempts,
        failure_budget=failure_budget,
    )


def started(instructions: list[Instruction]) -> list[MemberSpec]:
    return [instruction.member for instruction in instructions if isinstance(instruction, Start)]


def cancelled(instructions: list[Instruction]) -> list[TrajectoryKey]:
    return [instruction.key for instruction in instructions if isinstance(instruction, Cancel)]


def end_all(ledger: Ledger, members: list[MemberSpec], reward: float = 1.0) -> list[Instruction]:
    instructions: list[Instruction] = []
    for member in members:
        instructions += ledger.member_ended(header_for(member, outcome=Reward(reward)))
    return instructions


def test_sync_begins_a_batch_only_under_the_version_that_trains_on_it() -> None:
    ledger = make_ledger(mode="sync", alpha=0)
    members = started(ledger.begin())
    assert len(members) == 4
    assert end_all(ledger, members) == []
    batch, instructions = ledger.take_batch()
    assert batch is not None
    assert instructions == []
    assert len(started(ledger.version_advanced(1))) == 4


def test_tutti_with_alpha_1_keeps_one_batch_ahead_of_the_trainer() -> None:
    ledger = make_ledger(alpha=1)
    members = started(ledger.begin())
    assert len(members) == 8
    end_all(ledger, members)
    assert ledger.take_batch()[0] is not None
    assert ledger.take_batch()[0] is not None
    assert ledger.take_batch() == (None, [])
    assert len(started(ledger.version_advanced(1))) == 4


def test_members_of_a_group_share_the_environment_and_differ_in_sampling() -> None:
    ledger = make_ledger(groups=1, group_size=3, alpha=1)
    members = [member for member in started(ledger.begin()) if member.key.group == 0]
    assert len({member.environment_seed for member in members}) == 1
    assert len({member.sampling_seed for member in members}) == 3
    assert all(member.environment_seed < HELD_OUT_SEEDS_FROM for member in members)


def test_a_redundant_member_is_cancelled_once_its_group_is_complete_and_its_tokens_are_wasted() -> None:
    ledger = make_ledger(groups=1, alpha=1, redundancy=RedundancyConfig(members=1))
    members = started(ledger.begin())
    slow, *quick = [member for member in members if member.key.group == 0]
    instructions = end_all(ledger, quick)
    assert cancelled(instructions) == [slow.key]
    ledger.member_ended(header_for(slow, stop=StopReason.CANCELLED, sampled_tokens=5))
    batch, _ = ledger.take_batch()
    assert batch is not None
    assert [header.key for header in batch.groups[0].members] == [member.key for member in quick]
    assert batch.counts["tokens/wasted/cancelled"] == 5


def test_a_redundant_group_is_cancelled_when_it_would_be_too_old_for_the_next_batch() -> None:
    ledger = make_ledger(mode="sync_plus", alpha=0, groups=1, redundancy=RedundancyConfig(groups=1))
    members = started(ledger.begin())
    wanted = [member for member in members if member.key.group == 1]
    end_all(ledger, wanted)
    batch, instructions = ledger.take_batch()
    assert batch is not None
    assert {key.group for key in cancelled(instructions)} == {0}
    assert all(
        instruction.reason is StopReason.STALE
        for instruction in instructions
        if isinstance(instruction, Cancel)
    )


def test_one_off_begins_a_batch_only_when_the_one_before_it_is_complete() -> None:
    ledger = make_ledger(mode="one_off", alpha=1)
    first = started(ledger.begin())
    assert len(first) == 4
    assert started(ledger.version_advanced(0)) == []
    end_all(ledger, first)
    batch, instructions = ledger.take_batch()
    assert batch is not None
    second = started(instructions)
    assert len(second) == 4, "the batch of step 1 is generated under version 0 while step 0 trains"
    assert end_all(ledger, second) == []
    batch, instructions = ledger.take_batch()
    assert batch is not None
    assert instructions == [], "version 0 is too old for the batch of step 2"
    third = started(ledger.version_advanced(1))
    assert [member.initiating_version for member in third] == [1] * 4


def test_one_off_replaces_a_failed_group_within_the_batch() -> None:
    ledger = make_ledger(mode="one_off", alpha=1, groups=1, group_size=1, attempts=1)
    (member,) = started(ledger.begin())
    fault = header_for(member, outcome=InfraError("x"), stop=StopReason.ENVIRONMENT_ERROR)
    (replacement,) = started(ledger.member_ended(fault))
    assert replacement.initiating_version == 0


def test_areal_neither_aborts_nor_drops_what_has_become_too_old() -> None:
    ledger = make_ledger(mode="areal", alpha=1, groups=1, group_size=1)
    slow, quick = started(ledger.begin())
    end_all(ledger, [quick])
    for step in range(3):
        batch, instructions = ledger.take_batch()
        assert batch is not None
        assert cancelled(instructions) == []
        assert ledger.oldest_admissible_version == 0
        advanced = ledger.version_advanced(step + 1)
        assert cancelled(advanced) == []
        end_all(ledger, started(instructions + advanced))
    ledger.member_ended(header_for(slow, oldest_version=0))
    batch, _ = ledger.take_batch()
    assert batch is not None
    assert [group.members[0].key for group in batch.groups] == [slow.key]
    assert batch.step - batch.groups[0].oldest_version == 3


def test_areal_begins_no_more_than_its_capacity_allows() -> None:
    ledger = make_ledger(mode="areal", alpha=2, groups=2, group_size=1)
    assert len(started(ledger.begin())) == 6


@pytest.mark.parametrize("finished", [0, 1])
def test_a_group_past_its_deadline_is_closed_with_what_it_has_or_replaced(finished: int) -> None:
    ledger = make_ledger(groups=1, group_size=2, steps=1)
    members = started(ledger.begin())
    end_all(ledger, members[:finished])
    instructions = ledger.deadline_passed(members[0].key.group)
    assert cancelled(instructions) == [member.key for member in members[finished:]]
    replaced = started(instructions)
    assert len(replaced) == (0 if finished else 2)
    assert not {member.key.group for member in replaced} & {members[0].key.group}
    end_all(ledger, replaced)
    for member in members[finished:]:
        ledger.member_ended(header_for(member, stop=StopReason.CANCELLED, sampled_tokens=7))
    batch, _ = ledger.take_batch()
    assert batch is not None
    assert len(batch.groups[0].members) == (1 if finished else 2)
    assert batch.counts["groups/overdue"] == 1
    assert batch.counts["tokens/wasted/cancelled"] == 7 * (2 - finished)


def test_when_the_last_batch_is_there_everything_else_is_cancelled() -> None:
    ledger = make_ledger(groups=1, group_size=2, steps=1, redundancy=RedundancyConfig(groups=2))
    members = started(ledger.begin())
    quick, half_done = members[:2], members[2]
    end_all(ledger, [*quick, half_done])
    batch, instructions = ledger.take_batch()
    assert batch is not None
    assert set(cancelled(instructions)) == {member.key for member in members[3:]}
    assert {end.header.key: end.fate for end in batch.ends}[half_done.key] == "cancelled"
    assert ledger.groups_held == frozenset()
    for member in members[3:]:
        ledger.member_ended(header_for(member, stop=StopReason.CANCELLED))
    assert [end.header.key for end in ledger.rest()] == [member.key for member in members[3:]]
    assert ledger.rest() == []


def test_a_deadline_of_a_closed_group_changes_nothing() -> None:
    ledger = make_ledger(groups=1, group_size=1)
    member = started(ledger.begin())[0]
    end_all(ledger, [member])
    assert ledger.deadline_passed(member.key.group) == []
    assert ledger.take_batch()[0] is not None


def test_an_end_that_crosses_its_cancellation_is_wasted_and_never_trained() -> None:
    ledger = make_ledger(groups=1, alpha=1, steps=1, redundancy=RedundancyConfig(members=1))
    slow, *quick = started(ledger.begin())
    assert cancelled(end_all(ledger, quick)) == [slow.key]
    ledger.member_ended(header_for(slow, outcome=Reward(1.0), sampled_tokens=9))
    batch, _ = ledger.take_batch()
    assert batch is not None
    assert slow.key not in {header.key for header in batch.groups[0].members}
    assert batch.counts["tokens/wasted/cancelled"] == 9
    assert {str(end.header.key): end.fate for end in batch.ends}[str(slow.key)] == "cancelled"


def test_what_the_gate_refused_as_too_old_is_no_failure() -> None:
    ledger = make_ledger(groups=1, group_size=1, failure_budget=0, steps=1)
    member = started(ledger.begin())[0]
    (replacement,) = started(
        ledger.member_ended(
            header_for(member, outcome=Skip("stale"), stop=StopReason.STALE, sampled_tokens=4)
        )
    )
    end_all(ledger, [replacement])
    batch, _ = ledger.take_batch()
    assert batch is not None
    assert batch.counts["tokens/wasted/stale"] == 4
    assert "failures" not in batch.counts


def test_of_two_committed_attempts_of_a_member_a_restored_run_trains_one_and_counts_the_other() -> None:
    ledger = make_ledger(groups=1, group_size=1)
    attempts = [
        header_for(MemberSpec(TrajectoryKey(0, 0, attempt), "a", 0, 0, 0, 1.0), sampled_tokens=5 + attempt)
        for attempt in range(2)
    ]
    ledger.restore(version=0, next_step=0, trained=[], retired=[], committed=attempts)
    ledger.begin()
    batch, _ = ledger.take_batch()
    assert batch is not None
    assert [header.key.attempt for header in batch.groups[0].members] == [0]
    assert batch.counts["tokens/wasted/cancelled"] == 6


def test_samples_are_needed_back_to_the_oldest_group_that_is_open_or_ready() -> None:
    """A trajectory begun under version 0 may have sampled its first token under version 1, and lies with
    those of version 0."""
    ledger = make_ledger(groups=1, group_size=1, alpha=1)
    waits, runs = started(ledger.begin())
    ledger.member_ended(header_for(runs, oldest_version=0))
    assert ledger.take_batch()[0] is not None
    ledger.version_advanced(1)
    ledger.member_ended(header_for(waits, oldest_version=1))
    assert ledger.oldest_admissible_version == 0
    assert ledger.oldest_version_needed == 0
    assert ledger.take_batch()[0] is not None
    assert ledger.oldest_version_needed == 1


def test_work_in_flight_over_an_update_goes_on_while_alpha_allows() -> None:
    ledger = make_ledger(alpha=2, groups=1)
    members = started(ledger.begin())
    assert {member.key.group for member in members} == {0, 1, 2}
    end_all(ledger, [member for member in members if member.key.group == 0])
    assert ledger.take_batch()[0] is not None
    assert cancelled(ledger.version_advanced(1)) == []
    late = [header_for(member, oldest_version=0) for member in members if member.key.group == 1]
    for header in late:
        ledger.member_ended(header)
    batch, _ = ledger.take_batch()
    assert batch is not None
    assert batch.groups[0].group == 1


def test_a_ready_group_that_has_become_too_old_is_dropped_and_replaced() -> None:
    ledger = make_ledger(
        weights={"a": 1.0, "b": 1.0}, groups=2, alpha=1, redundancy=RedundancyConfig(groups=2)
    )
    members = started(ledger.begin())
    by_group = {
        group: [m for m in members if m.key.group == group] for group in {m.key.group for m in members}
    }
    assert sorted(by_group) == [0, 1, 2, 3, 4, 5]
    for group in (0, 1, 2, 3, 4):
        end_all(ledger, by_group[group])
    assert ledger.take_batch()[0] is not None
    ledger.version_advanced(1)
    assert ledger.take_batch()[0] is not None
    batch, instructions = ledger.take_batch()
    assert batch is None
    assert {key.group for key in cancelled(instructions)} <= {5}
    assert all(member.initiating_version == 1 for member in started(instructions))


def test_a_fault_is_tried_again_with_other_randomness() -> None:
    ledger = make_ledger(groups=1, group_size=1)
    first = started(ledger.begin())[0]
    fault = header_for(first, outcome=InfraError("hung"), stop=StopReason.ENVIRONMENT_TIMEOUT)
    (again,) = started(ledger.member_ended(fault))
    assert again.key == TrajectoryKey(first.key.group, 0, 1)
    assert again.environment_seed == first.environment_seed
    assert again.sampling_seed != first.sampling_seed


def test_a_group_that_fails_whole_is_replaced_by_another_of_its_domain() -> None:
    ledger = make_ledger(weights={"a": 1.0, "b": 1.0}, groups=2, group_size=1, attempts=1)
    members = started(ledger.begin())
    failing = next(member for member in members if member.domain == "b")
    instructions = ledger.member_ended(
        header_for(failing, outcome=InfraError("x"), stop=StopReason.ENVIRONMENT_ERROR)
    )
    (replacement,) = started(instructions)
    assert replacement.domain == "b"
    assert replacement.key.group not in {member.key.group for member in members}


def test_failures_without_end_stop_the_run_with_the_options_to_change() -> None:
    ledger = make_ledger(group_size=1, attempts=1, failure_budget=5)
    queue = started(ledger.begin())

    def fail_for_ever() -> None:
        for _ in range(50):
            fault = header_for(queue.pop(0), outcome=InfraError("x"), stop=StopReason.ENVIRONMENT_ERROR)
            queue.extend(started(ledger.member_ended(fault)))

    with pytest.raises(TooManyFailures, match=r"environment\.failure_budget"):
        fail_for_ever()


def test_groups_without_signal_are_refilled_and_then_named_with_the_pass_rate() -> None:
    ledger = make_ledger(algorithm=GrpoConfig(zero_variance="refill", refill_tries=2), groups=1)
    queue = started(ledger.begin())

    def succeed_for_ever() -> None:
        for _ in range(50):
            queue.extend(started(end_all(ledger, [queue.pop(0)])))

    with pytest.raises(NoSignal, match="0 of 3 groups"):
        succeed_for_ever()


def test_groups_without_signal_stay_in_the_batch_when_they_are_skipped_by_the_algorithm() -> None:
    ledger = make_ledger(algorithm=GrpoConfig(zero_variance="skip"), groups=1)
    end_all(ledger, started(ledger.begin()))
    batch, _ = ledger.take_batch()
    assert batch is not None
    assert batch.counts["groups/zero_variance"] >= 1


def test_news_of_finished_work_counts_once() -> None:
    ledger = make_ledger(groups=1)
    member = started(ledger.begin())[0]
    ledger.member_ended(header_for(member))
    before = ledger.running_members
    ledger.member_ended(header_for(member))
    assert ledger.running_members == before


def test_a_restored_run_keeps_committed_members_fills_gaps_and_repeats_nothing() -> None:
    ledger = make_ledger(weights={"a": 1.0, "b": 1.0}, groups=2, alpha=1)
    kept = header_for(MemberSpec(TrajectoryKey(6, 1), "a", 0, 0, 3, 1.0))
    ledger.restore(
        version=3,
        next_step=3,
        trained={(0, "a"), (1, "b"), (2, "a"), (3, "b"), (7, "b"), (8, "a")},
        retired=[5],
        committed=[kept, header_for(MemberSpec(TrajectoryKey(0, 0), "a", 0, 0, 0, 1.0))],
    )
    members = started(ledger.begin())
    keys = {(member.key.group, member.key.member) for member in members}
    assert (6, 0) in keys
    assert (6, 1) not in keys
    assert (4, 0) in keys, "a group that was begun and has nothing to show is begun again"
    assert not {group for group, _ in keys} & {0, 1, 2, 3, 5, 7, 8}


def test_a_restored_run_begins_the_same_groups_as_an_unbroken_one() -> None:
    unbroken, broken = make_ledger(mode="sync", alpha=0), make_ledger(mode="sync", alpha=0)
    end_all(unbroken, started(unbroken.begin()))
    unbroken.take_batch()
    broken.restore(version=1, next_step=1, trained={(0, "a"), (1, "a")}, retired=[], committed=[])
    assert broken.begin() == unbroken.version_advanced(1)


@settings(max_examples=150, deadline=None)
@given(
    schedule=st.integers(0, 2**32),
    end_weight=st.integers(1, 30),
    alpha=st.integers(0, 3),
    redundancy=st.builds(RedundancyConfig, groups=st.integers(0, 3), members=st.integers(0, 2)),
    zero_variance=st.sampled_from(["keep", "refill"]),
)
def test_under_any_schedule_nothing_too_old_is_trained_and_nothing_is_trained_twice(
    schedule: int, end_weight: int, alpha: int, redundancy: RedundancyConfig, zero_variance: str
) -> None:
    ledger = make_ledger(
        weights={"a": 2.0, "b": 1.0},
        mode="tutti" if alpha else "sync_plus",
        alpha=alpha,
        groups=3,
        redundancy=redundancy,
        algorithm=GrpoConfig(zero_variance=zero_variance, refill_tries=10**6),
    )
    running: dict[TrajectoryKey, MemberSpec] = {}
    trained: Counter[tuple[int, int]] = Counter()
    untrained_batches: list[Batch] = []
    trainer_version = served_version = 0

    def perform(instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Start(member):
                    assert member.key not in running
                    running[member.key] = member
                case Cancel(key, reason):
                    member = running.pop(key)
                    ledger.member_ended(header_for(member, outcome=InfraError(reason), stop=reason))

    def end(member: MemberSpec, **changes: object) -> TrajectoryHeader:
        del running[member.key]
        oldest = random.Random(member.sampling_seed).randint(member.initiating_version, served_version)
        return header_for(member, oldest_version=oldest, **changes)

    perform(ledger.begin())
    draw = random.Random(schedule)
    kinds = ["end"] * end_weight + ["fail", "stale", "batch", "batch", "train", "train"]
    for _ in range(500):
        kind, number = draw.choice(kinds), draw.randrange(10**6)
        if kind in ("end", "fail", "stale") and running:
            member = running[sorted(running)[number % len(running)]]
            changes: dict[str, object] = {"outcome": Reward(float(number % 2))}
            if kind == "fail":
                changes = {"outcome": InfraError("x"), "stop": StopReason.ENVIRONMENT_ERROR}
            if kind == "stale":
                changes = {"outcome": InfraError("stale"), "stop": StopReason.STALE}
            perform(ledger.member_ended(end(member, **changes)))
        elif kind == "batch" and len(untrained_batches) < 2:
            batch, instructions = ledger.take_batch()
            perform(instructions)
            if batch is not None:
                untrained_batches.append(batch)
                assert len(batch.groups) == 3
                assert Counter(group.domain for group in batch.groups) == {"a": 2, "b": 1}
                for group in batch.groups:
                    for header in group.members:
                        trained[header.key.group, header.key.member] += 1
                        assert batch.step - header.oldest_version <= alpha
        elif kind == "train" and untrained_batches and untrained_batches[0].step == trainer_version:
            untrained_batches.pop(0)
            trainer_version += 1
            served_version = trainer_version
            perform(ledger.version_advanced(served_version))
    assert max(trained.values(), default=1) == 1
    assert ledger.running_members == len(running)
    in_flight_groups = len({key.group for key in running})
    assert in_flight_groups + ledger.ready_groups <= 3 * (alpha + 1) + redundancy.groups
