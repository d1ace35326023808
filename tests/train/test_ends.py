"""Every trajectory that ended is given out once, with what became of it."""

import pytest

from tasks.train.ends import End, Ends, Fate, end_counts
from tasks.trajectory import InfraError, MemberSpec, Skip, StopReason, TrajectoryKey
from tests.builders import header_for


def member(group, number=0, domain="game"):
    return MemberSpec(TrajectoryKey(group, number), domain, 7, 9, 2, 1.0)


def fates(ends):
    return {str(end.header.key)[:14]: end.fate for end in ends}


def test_what_ended_well_waits_for_the_decision_over_its_group():
    ends = Ends()
    ends.wait(header_for(member(0, 0)))
    ends.wait(header_for(member(0, 1)))
    ends.wait(header_for(member(1, 0)))
    assert ends.take() == []
    ends.decide(0, Fate.TRAINED)
    assert fates(ends.take()) == {"g00000000-m000": Fate.TRAINED, "g00000000-m001": Fate.TRAINED}
    assert ends.take() == []
    ends.decide(1, Fate.STALE)
    ends.decide(2, Fate.STALE)
    assert fates(ends.take()) == {"g00000001-m000": Fate.STALE}


def test_members_beyond_those_that_are_trained_were_redundant():
    ends = Ends()
    headers = [header_for(member(0, number)) for number in range(3)]
    for header in headers:
        ends.wait(header)
    ends.decide(0, Fate.TRAINED, headers[:2])
    assert list(fates(ends.take()).values()) == [Fate.TRAINED, Fate.TRAINED, Fate.CANCELLED]


def test_a_line_says_all_that_is_known_of_the_end():
    header = header_for(member(3, 1), sampled_tokens=5, turns=2, generate_seconds=1.0)
    row = End(header, Fate.TRAINED).row(4)
    assert row == {
        "step": 4,
        "key": "g00000003-m001-a00",
        "group": 3,
        "domain": "game",
        "fate": "trained",
        "stop": "terminated",
        "cut_short": False,
        "outcome": "reward",
        "reward": 1.0,
        "tokens": 9,
        "sampled_tokens": 5,
        "turns": 2,
        "seconds": pytest.approx(1.011),
        "initiating_version": 2,
        "oldest_version": 2,
        "newest_version": 2,
    }


@pytest.mark.parametrize(
    ("stop", "outcome", "cut_short", "kind"),
    [
        (StopReason.CANCELLED, Skip("cancelled"), True, "skip"),
        (StopReason.STALE, Skip("stale"), True, "skip"),
        (StopReason.ENVIRONMENT_TIMEOUT, InfraError("hung"), True, "infra_error"),
        (StopReason.TERMINATED, InfraError("the verifier died"), False, "infra_error"),
    ],
)
def test_lengths_of_what_was_ended_from_outside_are_lower_bounds(stop, outcome, cut_short, kind):
    row = End(header_for(member(0), stop=stop, outcome=outcome), Fate.FAILED).row(0)
    assert (row["cut_short"], row["outcome"], row["reward"]) == (cut_short, kind, None)


def test_waste_is_counted_by_domain_and_fate_with_its_context():
    def end(fate, sampled, domain="game", **changes):
        return End(header_for(member(0, domain=domain), sampled_tokens=sampled, **changes), fate)

    aborted = {"stop": StopReason.CANCELLED, "outcome": Skip("cancelled"), "reward_seconds": 0.0}
    counts = end_counts(
        [
            end(Fate.TRAINED, 10, reward_seconds=0.2),
            end(Fate.CANCELLED, 5, **aborted),
            end(Fate.CANCELLED, 2, domain="web", **aborted),
            end(Fate.STALE, 7, reward_seconds=0.4),
        ]
    )
    assert counts == {
        "context/trained": 4,
        "context/wasted/cancelled": 8,
        "context/wasted/stale": 4,
        "waste/game/cancelled": 5,
        "waste/game/stale": 7,
        "waste/web/cancelled": 2,
        "reward/latency_p50": pytest.approx(0.3),
        "reward/latency_p99": pytest.approx(0.398),
    }
    assert end_counts([]) == {}
