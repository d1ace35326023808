"""Small real values that several tests need: headers and trajectories with every field filled in."""

from typing import Any

import numpy as np

from tasks.trajectory import (
    NOT_GENERATED,
    MemberSpec,
    Outcome,
    Reward,
    StopReason,
    Trajectory,
    TrajectoryHeader,
    TrajectoryKey,
    Turn,
)


def header_for(
    member: MemberSpec,
    *,
    outcome: Outcome | None = None,
    stop: StopReason = StopReason.TERMINATED,
    oldest_version: int | None = None,
    sampled_tokens: int = 3,
    **changes: Any,
) -> TrajectoryHeader:
    """The end of a member, by default with reward 1."""
    oldest = member.initiating_version if oldest_version is None else oldest_version
    fields: dict[str, Any] = {
        "key": member.key,
        "domain": member.domain,
        "stop": stop,
        "outcome": Reward(1.0) if outcome is None else outcome,
        "initiating_version": member.initiating_version,
        "oldest_version": oldest,
        "newest_version": oldest,
        "tokens": sampled_tokens + 4,
        "sampled_tokens": sampled_tokens,
        "turns": 1,
        "generate_seconds": 0.1,
        "environment_seconds": 0.01,
        "reward_seconds": 0.001,
        "name": str(member.key),
    }
    return TrajectoryHeader(**{**fields, **changes})


def trajectory_of(
    *,
    group: int = 0,
    member: int = 0,
    reward: float = 1.0,
    prompt: tuple[int, ...] = (5, 6, 7),
    response: tuple[int, ...] = (8, 9),
    version: int = 0,
    domain: str = "sums",
) -> Trajectory:
    """A single-turn trajectory."""
    tokens = np.array([*prompt, *response], np.int32)
    mask = np.array([False] * len(prompt) + [True] * len(response))
    return Trajectory(
        key=TrajectoryKey(group, member),
        domain=domain,
        seed=group,
        initiating_version=version,
        tokens=tokens,
        loss_mask=mask,
        logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        versions=np.where(mask, version, NOT_GENERATED).astype(np.int32),
        turns=[Turn(len(prompt), len(tokens), StopReason.STOP, "answer", reward)],
        stop=StopReason.TERMINATED,
        outcome=Reward(reward),
    )
