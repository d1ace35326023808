"""What every stage passes on: one trajectory, as arrays of equal length and a small header.

Sampled token ids are kept as the engine sampled them; text is never re-tokenised.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

NOT_GENERATED = -1
"""Version stamp of a token that the environment, a tool or the template wrote."""


class StopReason(StrEnum):
    """Why a trajectory ended. `stop` and `length` also say why one turn's generation ended."""

    STOP = "stop"  # the policy sampled its end token (turns only)
    LENGTH = "length"  # the turn's token budget cut the generation (turns only)
    TERMINATED = "terminated"  # the environment reached a terminal state
    TRUNCATED = "truncated"  # the environment's own limit on steps
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"  # the trajectory's token budget
    CONTEXT_OVERFLOW = "context_overflow"  # the next turn would not fit the model's context
    ENVIRONMENT_ERROR = "environment_error"  # reset or step raised
    ENVIRONMENT_TIMEOUT = "environment_timeout"  # reset or step hung and was killed
    GENERATION_ERROR = "generation_error"  # the inference side failed for good
    STALE = "stale"  # aborted: older than the staleness bound allows
    CANCELLED = "cancelled"  # aborted: redundant, the batch has what it needs

    @property
    def is_aborted(self) -> bool:
        """Ended by the control plane rather than by the policy or the environment."""
        return self in (StopReason.STALE, StopReason.CANCELLED)

    @property
    def is_failure(self) -> bool:
        """Ended by a fault that says nothing of the policy; the member may be tried again."""
        return self in (
            StopReason.ENVIRONMENT_ERROR,
            StopReason.ENVIRONMENT_TIMEOUT,
            StopReason.GENERATION_ERROR,
        )


@dataclass(frozen=True, slots=True)
class Reward:
    """A valid score. Only this outcome enters group statistics."""

    value: float


@dataclass(frozen=True, slots=True)
class Skip:
    """The sample cannot be judged (for example an unparsable gold answer); it is counted, not trained."""

    reason: str


@dataclass(frozen=True, slots=True)
class InfraError:
    """The scoring machinery failed; says nothing of the policy. Counted, not trained."""

    reason: str


Outcome = Reward | Skip | InfraError


@dataclass(frozen=True, slots=True, order=True)
class TrajectoryKey:
    """Deterministic name of one trajectory of a run: group, member of the group, attempt at the member."""

    group: int
    member: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"g{self.group:08d}-m{self.member:03d}-a{self.attempt:02d}"

    @classmethod
    def parse(cls, text: str) -> "TrajectoryKey":
        group, member, attempt = text.split("-")
        return cls(int(group[1:]), int(member[1:]), int(attempt[1:]))


@dataclass(slots=True)
class Turn:
    """One generation and the environment's answer. Offsets index the trajectory's arrays."""

    response_start: int  # first sampled token
    response_end: int  # one past the last sampled token
    stop: StopReason
    action: str  # the response as text, as the environment saw it
    environment_reward: float = 0.0
    generate_seconds: float = 0.0
    environment_seconds: float = 0.0


@dataclass(slots=True)
class Trajectory:
    """One episode of one agent in one environment.

    `tokens`, `loss_mask`, `logprobs` and `versions` have equal length T. `loss_mask` is True exactly on
    sampled tokens. `logprobs` are the engine's, of the distribution that was sampled from (after
    temperature), 0 where not sampled. `versions` is the policy version that sampled each token,
    `NOT_GENERATED` elsewhere.

    A chat template that changes the text of earlier messages breaks a trajectory into segments, which lie one
    after the other in the arrays: each begins with a whole context, as the engine was given it, and no token
    sees another segment's. Every response is sampled in one segment only. The log-probability at index t is
    that of `tokens[t]` given `tokens[s:t]`, where s is the start of its segment.
    """

    key: TrajectoryKey
    domain: str
    seed: int
    initiating_version: int  # the policy version when the trajectory was admitted
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    turns: list[Turn]
    stop: StopReason
    outcome: Outcome
    info: dict[str, Any] = field(default_factory=dict)  # JSON values the reward function needs or reports
    segment_starts: tuple[int, ...] = (0,)  # ascending, the first is 0

    def __post_init__(self) -> None:
        lengths = {len(self.tokens), len(self.loss_mask), len(self.logprobs), len(self.versions)}
        if len(lengths) != 1:
            raise ValueError(f"trajectory {self.key}: arrays of unequal lengths {sorted(lengths)}")
        stamped = self.versions >= 0
        if bool((self.loss_mask != stamped).any()) or bool((self.versions[~stamped] != NOT_GENERATED).any()):
            raise ValueError(
                f"trajectory {self.key}: a sampled token without a version stamp, or the reverse"
            )
        if self.segment_starts != (0,):
            bounds = [*self.segment_starts, len(self.tokens)]
            if bounds[0] != 0 or any(start >= end for start, end in pairwise(bounds)):
                raise ValueError(
                    f"trajectory {self.key}: segments of {len(self.tokens)} tokens cannot start at "
                    f"{list(self.segment_starts)}"
                )

    def segments(self) -> "list[Trajectory]":
        """Its segments as trajectories of one segment each: the same key and outcome, and their own turns.

        They are views of these arrays. A trajectory of one segment is its own and only one.
        """
        if len(self.segment_starts) == 1:
            return [self]
        return [
            replace(
                self,
                tokens=self.tokens[start:end],
                loss_mask=self.loss_mask[start:end],
                logprobs=self.logprobs[start:end],
                versions=self.versions[start:end],
                turns=[
                    replace(
                        turn,
                        response_start=turn.response_start - start,
                        response_end=turn.response_end - start,
                    )
                    for turn in self.turns
                    if start <= turn.response_start < end
                ],
                segment_starts=(0,),
            )
            for start, end in pairwise([*self.segment_starts, len(self.tokens)])
        ]

    @property
    def oldest_version(self) -> int:
        """The oldest version that sampled one of its tokens; the initiating one if none was sampled."""
        stamped = self.versions[self.versions != NOT_GENERATED]
        return int(stamped.min()) if stamped.size else self.initiating_version

    @property
    def newest_version(self) -> int:
        """The newest version that sampled one of its tokens; the initiating one if none was sampled."""
        return max(int(self.versions.max(initial=NOT_GENERATED)), self.initiating_version)

    @property
    def sampled_tokens(self) -> int:
        return int(self.loss_mask.sum())

    def header(
        self, *, name: str | None = None, reward_seconds: float = 0.0, error: str = ""
    ) -> "TrajectoryHeader":
        """What the control plane hears of it. `name` is its object in the sample buffer."""
        return TrajectoryHeader(
            key=self.key,
            domain=self.domain,
            stop=self.stop,
            outcome=self.outcome,
            initiating_version=self.initiating_version,
            oldest_version=self.oldest_version,
            newest_version=self.newest_version,
            tokens=len(self.tokens),
            sampled_tokens=self.sampled_tokens,
            turns=len(self.turns),
            generate_seconds=sum(turn.generate_seconds for turn in self.turns),
            environment_seconds=sum(turn.environment_seconds for turn in self.turns),
            reward_seconds=reward_seconds,
            name=name,
            error=error,
        )


@dataclass(frozen=True, slots=True)
class MemberSpec:
    """One member of a group, as the control plane asks an environment worker to run it."""

    key: TrajectoryKey
    domain: str
    environment_seed: int  # the same for every member of a group
    sampling_seed: int  # differs between members and attempts
    initiating_version: int
    temperature: float
    commit: bool = True  # False in evaluation: only the header is wanted

    def to_json(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in self.__slots__}, "key": str(self.key)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "MemberSpec":
        return cls(**{**data, "key": TrajectoryKey.parse(data["key"])})


@dataclass(frozen=True, slots=True)
class TrajectoryHeader:
    """What the control plane hears of a trajectory that ended; the arrays stay in the sample buffer."""

    key: TrajectoryKey
    domain: str
    stop: StopReason
    outcome: Outcome
    initiating_version: int
    oldest_version: int
    newest_version: int
    tokens: int
    sampled_tokens: int
    turns: int
    generate_seconds: float
    environment_seconds: float
    reward_seconds: float
    name: str | None = None  # its object in the sample buffer; None when it was not committed
    error: str = ""  # what an environment, engine or reward raised

    def __post_init__(self) -> None:
        if not 0 <= self.oldest_version <= self.newest_version or self.initiating_version < 0:
            raise ValueError(
                f"trajectory {self.key}: impossible version stamps: initiated at {self.initiating_version}, "
                f"sampled by {self.oldest_version} to {self.newest_version}"
            )
        if not 0 <= self.sampled_tokens <= self.tokens:
            raise ValueError(
                f"trajectory {self.key}: {self.sampled_tokens} sampled tokens of {self.tokens} in all"
            )

    def to_json(self) -> dict[str, Any]:
        data = {field_name: getattr(self, field_name) for field_name in self.__slots__}
        return {
            **data,
            "key": str(self.key),
            "stop": self.stop.value,
            "outcome": outcome_to_json(self.outcome),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "TrajectoryHeader":
        return cls(
            **{
                **data,
                "key": TrajectoryKey.parse(data["key"]),
                "stop": StopReason(data["stop"]),
                "outcome": outcome_from_json(data["outcome"]),
            }
        )


def outcome_to_json(outcome: Outcome) -> list[Any]:
    match outcome:
        case Reward(value):
            return ["reward", value]
        case Skip(reason):
            return ["skip", reason]
        case InfraError(reason):
            return ["infra_error", reason]


def outcome_from_json(data: list[Any]) -> Outcome:
    kind, value = data
    return {"reward": Reward, "skip": Skip, "infra_error": InfraError}[kind](value)
