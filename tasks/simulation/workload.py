"""What a campaign's trajectories do in a simulation: lengths, turns, latencies, faults and rewards, by name.

Every draw is the inverse CDF of a uniform hashed from the campaign's seed, the trajectory's name, the turn
and what is drawn. So it depends on nothing that happens: the same campaign under another cluster, mode or
alpha is given the same work, and differences between two simulations are theirs.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum
from statistics import NormalDist
from typing import Annotated

import xxhash
from pydantic import Field

from infra.config import Config
from infra.performance.distributions import Distribution, constant
from tasks.rollout.engines.base import GenerateRequest
from tasks.trajectory import TrajectoryKey

_STANDARD = NormalDist()
_FIVE = struct.Struct("<5q").pack
Share = Annotated[float, Field(ge=0, le=1)]


class _What(IntEnum):
    """What is drawn. Its number is hashed, so a new one goes to the end."""

    PROMPT = 0
    TURNS = 1
    RESPONSE = 2
    OBSERVATION = 3
    RESET = 4
    STEP = 5
    REWARD = 6
    COLD_START = 7
    RESET_FAILS = 8
    STEP_FAILS = 9
    SUCCESS = 10


class WorkloadError(ValueError):
    """A workload that does not fit its campaign; the message names the option to change."""


class DomainWorkload(Config):
    """The trajectories of one domain. Lengths are in tokens and rounded, at least 1; times in seconds.

    The campaign's budgets hold beside it: `max_turns`, `max_turn_tokens` and `max_tokens` cut what is longer,
    and a reset, step or reward over its limit fails as it would in a run.
    """

    prompt_tokens: Distribution
    """Of the first context, template and system prompt included. A group's members have the same."""
    turns: Distribution = Field(default_factory=lambda: constant(1))
    """Turns after which the environment ends the episode."""
    response_tokens: Distribution
    """Sampled in a turn that nothing cuts, end token included."""
    observation_tokens: Distribution = Field(default_factory=lambda: constant(1))
    """Between one response and the next, template included."""
    reset_s: Distribution = Field(default_factory=lambda: constant(0))
    step_s: Distribution = Field(default_factory=lambda: constant(0))
    reward_s: Distribution = Field(default_factory=lambda: constant(0))
    """Of a reward worker or a function, without its wait and cold start."""
    reset_failure: Share = 0.0
    """Probability that a reset raises, after the time it takes."""
    step_failure: Share = 0.0
    """Probability, of each step."""
    success: Share = 0.5
    """Probability of the highest reward; otherwise it is the lowest (`domains.*.reward_range`). Members of a
    group succeed independently of each other."""
    group_share: Share = 0.5
    """Share of the variance in turns and lengths of responses that members of a group have in common (of
    their normal scores: a Gaussian copula). A group's part of the lengths is the same in all its turns."""


class Workload:
    """Answers for every trajectory of a campaign, each time the same."""

    def __init__(self, workloads: Mapping[str, DomainWorkload], domains: Sequence[str], seed: int):
        """`domains` are the campaign's, in its order, by which groups are numbered (`tasks.train.ledger`).

        Raises `WorkloadError` when one of them has no workload.
        """
        missing = [name for name in domains if name not in workloads]
        if missing:
            raise WorkloadError(
                f"workload has no domain {', '.join(missing)}, which the campaign trains on: it has "
                f"{', '.join(workloads) or 'none'}"
            )
        self._domains = [workloads[name] for name in domains]
        self._seed = seed & 0xFFFFFFFFFFFFFFFF
        self._prompts: dict[int, int] = {}
        self._group_scores: dict[tuple[_What, int], float] = {}

    def domain(self, group: int) -> DomainWorkload:
        return self._domains[group % len(self._domains)]

    def prompt_tokens(self, group: int) -> int:
        kept = self._prompts.get(group)
        if kept is None:
            drawn = self.domain(group).prompt_tokens.quantile(self._uniform(_What.PROMPT, group))
            kept = self._prompts[group] = _whole(drawn)
        return kept

    def turns(self, key: TrajectoryKey) -> int:
        domain = self.domain(key.group)
        own = self._uniform(_What.TURNS, key.group, key.member, key.attempt)
        return _whole(domain.turns.quantile(self._with_group(_What.TURNS, key.group, own)))

    def observation_tokens(self, key: TrajectoryKey, turn: int) -> int:
        domain = self.domain(key.group)
        return _whole(domain.observation_tokens.quantile(self._of_turn(_What.OBSERVATION, key, turn)))

    def reset_s(self, key: TrajectoryKey) -> float:
        return self.domain(key.group).reset_s.quantile(self._of_turn(_What.RESET, key, 0))

    def step_s(self, key: TrajectoryKey, turn: int) -> float:
        return self.domain(key.group).step_s.quantile(self._of_turn(_What.STEP, key, turn))

    def reward_s(self, key: TrajectoryKey) -> float:
        return self.domain(key.group).reward_s.quantile(self._of_turn(_What.REWARD, key, 0))

    def cold_start_s(self, key: TrajectoryKey, of: Distribution) -> float:
        """Of the instance that is started for the trajectory's reward, if one is."""
        return of.quantile(self._of_turn(_What.COLD_START, key, 0))

    def reset_fails(self, key: TrajectoryKey) -> bool:
        chance = self.domain(key.group).reset_failure
        return chance > 0 and self._of_turn(_What.RESET_FAILS, key, 0) < chance

    def step_fails(self, key: TrajectoryKey, turn: int) -> bool:
        chance = self.domain(key.group).step_failure
        return chance > 0 and self._of_turn(_What.STEP_FAILS, key, turn) < chance

    def succeeds(self, key: TrajectoryKey) -> bool:
        return self._of_turn(_What.SUCCESS, key, 0) < self.domain(key.group).success

    def response_tokens(self, request: GenerateRequest) -> int:
        """How long the request's turn is if nothing cuts it, end token included.

        A turn's draws have a seed of their own in every request, and an interrupted turn that goes on has
        the same one.
        """
        group = _group_of(request.session)
        own = self._uniform(_What.RESPONSE, request.seed)
        u = self._with_group(_What.RESPONSE, group, own)
        return _whole(self.domain(group).response_tokens.quantile(u))

    def prompt_of(self, request: GenerateRequest) -> tuple[str, int]:
        """The prompt that the members of the request's group share: a name of it, and its tokens."""
        group = _group_of(request.session)
        return f"g{group}", self.prompt_tokens(group)

    def _with_group(self, what: _What, group: int, own: float) -> float:
        """The uniform of a member from its own and its group's, correlated by `group_share`."""
        share = self.domain(group).group_share
        if share == 0:
            return own
        common = self._group_scores.get((what, group))
        if common is None:
            common = _STANDARD.inv_cdf(self._uniform(what, group, -1))
            self._group_scores[what, group] = common
        score = math.sqrt(share) * common + math.sqrt(1 - share) * _STANDARD.inv_cdf(own)
        return min(max(_STANDARD.cdf(score), 2.0**-54), 1 - 2.0**-53)

    def _of_turn(self, what: _What, key: TrajectoryKey, turn: int) -> float:
        return self._uniform(what, key.group, key.member, key.attempt, turn)

    def _uniform(self, what: _What, first: int, second: int = 0, third: int = 0, fourth: int = 0) -> float:
        """In the open interval of 0 to 1: 52 bits of XXH3 of what is asked, by the campaign's seed."""
        asked = _FIVE(what, first, second, third, fourth)
        return ((xxhash.xxh3_64_intdigest(asked, self._seed) >> 12) + 0.5) * 2.0**-52


def key_of(session: str) -> TrajectoryKey:
    """The trajectory of a session, whose name may have a prefix."""
    return TrajectoryKey.parse(session[session.rindex("g") :])


def _group_of(session: str) -> int:
    """The group of `key_of`, without the rest."""
    start = session.rindex("g") + 1
    return int(session[start : session.index("-", start)])


def _whole(drawn: float) -> int:
    return max(round(drawn), 1)
