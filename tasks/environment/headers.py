"""Headers: what the control plane hears of a trajectory that ended."""

from tasks.environment.episode import Episode
from tasks.trajectory import InfraError, MemberSpec, StopReason, Trajectory, TrajectoryHeader


def header_of(
    trajectory: Trajectory, episode: Episode, reward_seconds: float, name: str | None
) -> TrajectoryHeader:
    """The header of a judged trajectory; `name` is its object's in the sample buffer, if it has one."""
    stamped = trajectory.versions[trajectory.loss_mask]
    oldest, newest = (int(stamped.min()), int(stamped.max())) if stamped.size else (None, None)
    return TrajectoryHeader(
        key=trajectory.key,
        domain=trajectory.domain,
        stop=trajectory.stop,
        outcome=trajectory.outcome,
        initiating_version=trajectory.initiating_version,
        oldest_version=trajectory.initiating_version if oldest is None else oldest,
        newest_version=trajectory.initiating_version if newest is None else newest,
        tokens=len(trajectory.tokens),
        sampled_tokens=int(stamped.size),
        turns=len(trajectory.turns),
        generate_seconds=sum(turn.generate_seconds for turn in trajectory.turns),
        environment_seconds=episode.environment_seconds,
        reward_seconds=reward_seconds,
        name=name,
        error=episode.error,
    )


def fault_header(spec: MemberSpec, error: str) -> TrajectoryHeader:
    """The header of a member of which there is nothing but a fault."""
    return TrajectoryHeader(
        key=spec.key,
        domain=spec.domain,
        stop=StopReason.ENVIRONMENT_ERROR,
        outcome=InfraError(error),
        initiating_version=spec.initiating_version,
        oldest_version=spec.initiating_version,
        newest_version=spec.initiating_version,
        tokens=0,
        sampled_tokens=0,
        turns=0,
        generate_seconds=0.0,
        environment_seconds=0.0,
        reward_seconds=0.0,
        error=error,
    )
