import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from infra.rpc import ConnectionLost, RpcError
from tasks.environment.config import DomainConfig
from tasks.environment.episode import AbortSwitch, Episode, run_episode, turn_seed
from tasks.environment.hosts import EnvironmentHosts
from tasks.environment.rendering import ChatRenderer
from tasks.rollout.engines.base import Generation
from tasks.trajectory import MemberSpec, StopReason, TrajectoryKey
from tests.environment import chat

SPEC = MemberSpec(TrajectoryKey(3, 1), "d", 7, 5, 2, 1.0)
DOMAIN = DomainConfig(
    source="tests.environment.misbehaving:Obedient",
    max_turns=4,
    max_turn_tokens=12,
    max_tokens=400,
    reset_limit_s=0.5,
    step_limit_s=0.5,
)
PROMPT = chat.ids("<|im_start|>user\ngo 7<|im_end|>\n<|im_start|>assistant\n")


def observation(turn: int) -> list[int]:
    return chat.ids(f"\n<|im_start|>user\nstep {turn}<|im_end|>\n<|im_start|>assistant\n")


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return ChatRenderer(chat.save(tmp_path_factory.mktemp("chat")))


@pytest.fixture
async def hosts() -> AsyncIterator[EnvironmentHosts]:
    running = EnvironmentHosts({"d": DOMAIN}, 1)
    await running.start()
    yield running
    await running.close()


class Policy:
    """Says what it is given, a text a turn, as an engine would return it: cut at the budget, and stamped."""

    def __init__(self, *says: str | Exception | Generation, version: int = 2):
        self._says = says
        self._version = version
        self.asked: list[tuple[list[int], int, int]] = []

    async def __call__(self, context: Any, max_new_tokens: int, turn: int) -> Generation:
        assert turn == len(self.asked)
        self.asked.append((context.tolist(), max_new_tokens, turn))
        said = self._says[turn]
        if isinstance(said, Exception):
            raise said
        if isinstance(said, Generation):
            return said
        tokens = chat.ids(said + "<|im_end|>")
        stop = StopReason.STOP if len(tokens) <= max_new_tokens else StopReason.LENGTH
        return sampled(tokens[:max_new_tokens], stop, self._version + turn)


def sampled(tokens: list[int], stop: StopReason, version: int = 2) -> Generation:
    length = len(tokens)
    return Generation(
        np.array(tokens, np.int32),
        np.full(length, -0.5, np.float32),
        np.full(length, version, np.int32),
        stop,
    )


async def play(
    hosts: EnvironmentHosts, renderer: ChatRenderer, policy: Policy, *, seed: int = 7, **options: Any
) -> Episode:
    changes = {name: options.pop(name) for name in list(options) if name in DomainConfig.model_fields}
    domain = DOMAIN.model_copy(update=changes)
    spec = replace(SPEC, environment_seed=seed)
    return await run_episode(spec, domain, hosts.environment("d"), policy, renderer, **options)


async def test_an_episode_is_one_sequence_of_what_was_sampled_and_what_was_observed(hosts, renderer):
    policy = Policy("0.5", "1", "end")
    episode = await play(hosts, renderer, policy)
    one, two, three = (chat.ids(text + "<|im_end|>") for text in ("0.5", "1", "end"))
    expected = [*PROMPT, *one, *observation(1), *two, *observation(2), *three]
    trajectory = episode.trajectory
    assert trajectory.tokens.tolist() == expected
    spans = [(turn.response_start, turn.response_end) for turn in trajectory.turns]
    assert [expected[start:end] for start, end in spans] == [one, two, three]
    mask = np.zeros(len(expected), bool)
    for start, end in spans:
        mask[start:end] = True
    assert trajectory.loss_mask.tolist() == mask.tolist()
    assert trajectory.logprobs.tolist() == np.where(mask, -0.5, 0.0).tolist()
    assert trajectory.versions[mask].tolist() == [2] * len(one) + [3] * len(two) + [4] * len(three)
    assert [turn.action for turn in trajectory.turns] == ["0.5", "1", "end"]
    assert [turn.environment_reward for turn in trajectory.turns] == [0.5, 1.0, 0.0]
    assert trajectory.stop is StopReason.TERMINATED
    assert (trajectory.oldest_version, trajectory.seed) == (2, 7)
    assert episode.prompt == "go 7"
    assert episode.observations == ["step 1", "step 2", "step 3"]
    assert trajectory.info == {"pid": hosts.pids[0]}
    assert [context for context, _, _ in policy.asked] == [expected[:start] for start, _ in spans]


async def test_a_turn_cut_by_its_budget_keeps_that_reason_and_is_ended_unsampled(hosts, renderer):
    policy = Policy("123456789012345", "end")
    trajectory = (await play(hosts, renderer, policy)).trajectory
    assert [turn.stop for turn in trajectory.turns] == [StopReason.LENGTH, StopReason.STOP]
    assert trajectory.turns[0].action == "123456789012"
    end = trajectory.turns[0].response_end
    assert trajectory.tokens[end : end + 2].tolist() == chat.ids("<|im_end|>\n")
    assert not trajectory.loss_mask[end]
    assert trajectory.stop is StopReason.TERMINATED


async def test_max_turns_and_the_environments_own_ends(hosts, renderer):
    assert (await play(hosts, renderer, Policy(*"1111"))).trajectory.stop is StopReason.MAX_TURNS
    assert (await play(hosts, renderer, Policy("cut"))).trajectory.stop is StopReason.TRUNCATED
    last = await play(hosts, renderer, Policy("1", "end"), max_turns=2)
    assert last.trajectory.stop is StopReason.TERMINATED


async def test_a_turn_is_shortened_to_what_the_trajectory_has_left(hosts, renderer):
    policy = Policy("1", "123456789")
    budget = len(PROMPT) + 2 + len(observation(1)) + 5
    trajectory = (await play(hosts, renderer, policy, max_tokens=budget)).trajectory
    assert [asked for _, asked, _ in policy.asked] == [12, 5]
    assert trajectory.turns[1].stop is StopReason.LENGTH
    assert trajectory.turns[1].environment_reward == 12345.0
    assert trajectory.stop is StopReason.MAX_TOKENS
    assert len(trajectory.tokens) == budget


@pytest.mark.parametrize("left", [-3, 0, 1])
async def test_without_room_for_one_token_nothing_is_asked(hosts, renderer, left):
    policy = Policy("1", "1", "end")
    budget = len(PROMPT) + 2 + len(observation(1)) + left
    trajectory = (await play(hosts, renderer, policy, max_tokens=budget)).trajectory
    assert len(policy.asked) == (2 if left > 0 else 1)
    assert trajectory.stop is StopReason.MAX_TOKENS
    assert len(trajectory.tokens) <= budget
    assert bool(trajectory.loss_mask[-1])  # an observation that nothing follows is left out


async def test_an_episode_that_ended_is_not_called_overflowed(hosts, renderer):
    budget = len(PROMPT) + len(chat.ids("end<|im_end|>"))
    trajectory = (await play(hosts, renderer, Policy("end"), max_tokens=budget)).trajectory
    assert trajectory.stop is StopReason.TERMINATED
    assert len(trajectory.tokens) == budget


async def test_a_prompt_that_does_not_fit_is_no_error(hosts, renderer):
    episode = await play(hosts, renderer, Policy(), max_tokens=len(PROMPT))
    assert episode.trajectory.stop is StopReason.MAX_TOKENS
    assert len(episode.trajectory.tokens) == 0
    assert episode.error == ""


async def test_the_models_context_is_a_bound_with_a_reason_of_its_own(hosts, renderer):
    policy = Policy("1", "1", "1", "1")
    trajectory = (await play(hosts, renderer, policy, context_limit=len(PROMPT) + 4)).trajectory
    assert [asked for _, asked, _ in policy.asked] == [4]
    assert trajectory.stop is StopReason.CONTEXT_OVERFLOW


@pytest.mark.parametrize(
    ("error", "stop"),
    [
        (RpcError("stale", "too old"), StopReason.STALE),
        (RpcError("cancelled", "not needed"), StopReason.CANCELLED),
        (RpcError("context_overflow", "too long"), StopReason.CONTEXT_OVERFLOW),
        (RpcError("generation_failed", "no worker"), StopReason.GENERATION_ERROR),
        (RpcError("internal", "bug"), StopReason.GENERATION_ERROR),
        (ConnectionLost("gone"), StopReason.GENERATION_ERROR),
        (TimeoutError(), StopReason.GENERATION_ERROR),
    ],
)
async def test_what_generation_raises_is_a_stop_reason_and_keeps_earlier_tokens(hosts, renderer, error, stop):
    episode = await play(hosts, renderer, Policy("1", error))
    assert episode.trajectory.stop is stop
    assert episode.trajectory.sampled_tokens == 2
    assert episode.error


@pytest.mark.parametrize(
    "bad",
    [
        replace(sampled([5, 6], StopReason.STOP), logprobs=np.zeros(1, np.float32)),
        replace(sampled([5, 6], StopReason.STOP), versions=np.zeros(3, np.int32)),
        sampled([5] * 13, StopReason.LENGTH),
        sampled([], StopReason.STOP),
        sampled([5, 6], StopReason.STOP, version=-1),
    ],
)
async def test_a_malformed_generation_is_an_error_and_never_trained(hosts, renderer, bad):
    episode = await play(hosts, renderer, Policy(bad))
    assert episode.trajectory.stop is StopReason.GENERATION_ERROR
    assert episode.error.startswith("the engine returned")
    assert episode.trajectory.sampled_tokens == 0


async def test_an_aborted_generation_keeps_the_tokens_made_so_far(hosts, renderer):
    partial = sampled(chat.ids("12"), StopReason.CANCELLED)
    trajectory = (await play(hosts, renderer, Policy("1", partial))).trajectory
    assert trajectory.stop is StopReason.CANCELLED
    assert trajectory.sampled_tokens == 2 + 2
    assert len(trajectory.turns) == 2


@pytest.mark.parametrize(
    ("says", "stop", "error"),
    [
        ("raise", StopReason.ENVIRONMENT_ERROR, "told to raise"),
        ("hang", StopReason.ENVIRONMENT_TIMEOUT, "domains.d.step_limit_s"),
        ("crash", StopReason.ENVIRONMENT_ERROR, "EnvironmentHostDied"),
    ],
)
async def test_a_fault_of_the_environment_is_a_stop_reason(hosts, renderer, says, stop, error):
    episode = await play(hosts, renderer, Policy("1", says))
    assert episode.trajectory.stop is stop
    assert error in episode.error
    assert len(episode.trajectory.turns) == 2


async def test_a_reset_that_raises_leaves_an_empty_trajectory(hosts, renderer):
    episode = await play(hosts, renderer, Policy(), seed=-1)
    assert episode.trajectory.stop is StopReason.ENVIRONMENT_ERROR
    assert len(episode.trajectory.tokens) == 0


async def test_an_abort_ends_an_episode_at_once_while_its_environment_steps(hosts, renderer):
    switch = AbortSwitch()
    running = asyncio.create_task(play(hosts, renderer, Policy("1", "sleep 0.4"), switch=switch))
    await asyncio.sleep(0.15)
    began = asyncio.get_running_loop().time()
    switch.abort(StopReason.STALE)
    episode = await running
    assert asyncio.get_running_loop().time() - began < 0.1
    assert episode.trajectory.stop is StopReason.STALE
    assert episode.trajectory.sampled_tokens == 2 + len("sleep 0.4") + 1


@pytest.mark.parametrize("answers", [True, False])
async def test_an_abort_waits_for_the_partial_generation_but_not_for_ever(hosts, renderer, answers):
    switch = AbortSwitch(grace_s=0.2)
    asked = asyncio.Event()

    async def generate(context: Any, max_new_tokens: int, turn: int) -> Generation:
        asked.set()
        await asyncio.sleep(0.1 if answers else 60)
        return sampled(chat.ids("12"), StopReason.CANCELLED)

    running = asyncio.create_task(play(hosts, renderer, generate, switch=switch))  # type: ignore[arg-type]
    await asked.wait()
    switch.abort(StopReason.CANCELLED)
    episode = await asyncio.wait_for(running, 2)
    assert episode.trajectory.stop is StopReason.CANCELLED
    assert episode.trajectory.sampled_tokens == (2 if answers else 0)


async def test_an_abort_before_the_start_runs_nothing_and_after_the_end_changes_nothing(hosts, renderer):
    early = AbortSwitch()
    early.abort(StopReason.CANCELLED)
    episode = await play(hosts, renderer, Policy(), switch=early)
    assert (episode.trajectory.stop, episode.prompt) == (StopReason.CANCELLED, "")
    late = AbortSwitch()
    episode = await play(hosts, renderer, Policy("end"), switch=late)
    late.abort(StopReason.CANCELLED)
    await asyncio.sleep(0)
    assert episode.trajectory.stop is StopReason.TERMINATED


async def test_cancelling_the_caller_is_not_mistaken_for_an_abort(hosts, renderer):
    running = asyncio.create_task(play(hosts, renderer, Policy("sleep 0.4")))
    await asyncio.sleep(0.1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def test_seeds_of_turns_are_fixed_and_differ_between_turns_and_members():
    assert turn_seed(5, 0) == 0x1AC37B327156496D // 2  # printf 5:0 | b2sum -l 64, read little-endian
    seeds = {turn_seed(member, turn) for member in range(50) for turn in range(50)}
    assert len(seeds) == 2500
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return ChatRenderer(chat.save(tmp_path_factory.mktemp("qwen3"), chat.published("qwen3")))


FIRST = "<|im_start|>user\ngo 7<|im_end|>\n<|im_start|>assistant\n"


async def test_a_template_that_drops_a_thought_splits_the_trajectory_and_each_response_is_in_one_segment(
    hosts, qwen3
):
    says = ("0.5", "<think>\nhm\n</think>\n\n1", "2", "end")
    policy = Policy(*says)
    trajectory = (await play(hosts, qwen3, policy, max_turn_tokens=30)).trajectory
    one, thought, two, three = (chat.ids(text + "<|im_end|>") for text in says)
    before = [*PROMPT, *one, *observation(1), *thought]
    anew = chat.ids(
        f"{FIRST}0.5<|im_end|>\n<|im_start|>user\nstep 1<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n"
        "<|im_start|>user\nstep 2<|im_end|>\n<|im_start|>assistant\n"
    )
    after = [*anew, *two, *observation(3), *three]
    assert trajectory.tokens.tolist() == [*before, *after]
    assert trajectory.segment_starts == (0, len(before))
    first, second = trajectory.segments()
    assert (first.tokens.tolist(), second.tokens.tolist()) == (before, after)
    spoken = [
        segment.tokens[turn.response_start : turn.response_end].tolist()
        for segment in (first, second)
        for turn in segment.turns
    ]
    assert spoken == [one, thought, two, three]
    assert [segment.sampled_tokens for segment in (first, second)] == [len(one + thought), len(two + three)]
    stamps = [2] * len(one) + [3] * len(thought) + [4] * len(two) + [5] * len(three)
    assert trajectory.versions[trajectory.loss_mask].tolist() == stamps
    contexts = [context for context, _, _ in policy.asked]
    assert contexts[2:] == [anew, [*anew, *two, *observation(3)]]
    assert trajectory.stop is StopReason.TERMINATED


async def test_a_context_begun_anew_that_does_not_fit_ends_the_trajectory_and_leaves_no_empty_segment(
    hosts, qwen3
):
    thought = "<think>\n1\n</think>\n\n1"
    budget = len(PROMPT) + len(chat.ids(thought + "<|im_end|>"))
    policy = Policy(thought)
    trajectory = (await play(hosts, qwen3, policy, max_turn_tokens=30, max_tokens=budget)).trajectory
    assert trajectory.segment_starts == (0,)
    assert len(trajectory.tokens) == budget
    assert trajectory.stop is StopReason.MAX_TOKENS


async def test_an_end_token_at_the_very_end_of_the_budget_is_not_doubled(hosts, renderer):
    """And one that the engine says it sampled but left out is put in, unsampled."""
    cut = sampled(chat.ids("1<|im_end|>"), StopReason.LENGTH)
    left_out = sampled(chat.ids("1"), StopReason.STOP)
    trajectory = (await play(hosts, renderer, Policy(cut, left_out, "end"))).trajectory
    one, end = chat.ids("1<|im_end|>"), chat.ids("end<|im_end|>")
    assert trajectory.tokens.tolist() == [*PROMPT, *one, *observation(1), *one, *observation(2), *end]
    assert trajectory.sampled_tokens == len(one) + 1 + len(end)


async def test_a_system_prompt_of_the_domain_comes_first(hosts, renderer):
    policy = Policy("end")
    await play(hosts, renderer, policy, system_prompt="Be brief.")
    assert policy.asked[0][0] == [*chat.ids("<|im_start|>system\nBe brief.<|im_end|>\n"), *PROMPT]
