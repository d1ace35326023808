"""A run's folder, written by hand: trajectories, and when what was done."""

from pathlib import Path

import numpy as np

from infra.object_store import ObjectStore
from tasks.report.run_files import RunFiles
from tasks.train.archive import write_archive
from tasks.train.ends import End, Fate
from tasks.trajectory import Reward, StopReason, Trajectory, TrajectoryKey, Turn
from tests.simulation.small import small_campaign

PROMPT, OBSERVATION = 50, 20
RESET_S, STEP_S, GENERATE_S, REWARD_S = 3.0, 0.5, 2.0, 0.25


def trajectory(
    group: int,
    member: int,
    *,
    turns: int = 2,
    response_tokens: int = 30,
    generate_s: float = GENERATE_S,
    stop: StopReason = StopReason.STOP,
    reward: float = 1.0,
) -> Trajectory:
    """Of `turns` equal turns."""
    length = PROMPT + turns * response_tokens + (turns - 1) * OBSERVATION
    versions = np.full(length, -1, np.int32)
    made = []
    start = PROMPT
    for _ in range(turns):
        versions[start : start + response_tokens] = 0
        made.append(
            Turn(
                start,
                start + response_tokens,
                stop,
                "",
                generate_seconds=generate_s,
                environment_seconds=STEP_S,
            )
        )
        start += response_tokens + OBSERVATION
    return Trajectory(
        key=TrajectoryKey(group, member),
        domain="math",
        seed=group,
        initiating_version=0,
        tokens=np.ones(length, np.int32),
        loss_mask=versions >= 0,
        logprobs=np.zeros(length, np.float32),
        versions=versions,
        turns=made,
        stop=StopReason.TERMINATED,
        outcome=Reward(reward),
    )


def write_run(folder: Path, steps: list[list[Trajectory]], failed: int = 0) -> Path:
    """A run of these batches, 10 s each of which training takes 4; `failed` resets fail in each."""
    files = RunFiles(folder)
    files.folder.mkdir(parents=True, exist_ok=True)
    files.write_campaign(small_campaign(steps=len(steps)).dump())
    store = ObjectStore(str(folder / "samples"))
    for step, batch in enumerate(steps):
        files.append_metrics(
            {"step": step, "time": 10.0 * (step + 1), "trajectories": len(batch), "seconds/step": 10.0}
        )
        rows = []
        for each in batch:
            seconds = sum(turn.generate_seconds + turn.environment_seconds for turn in each.turns)
            row = End(each.header(), Fate.TRAINED).row(step)
            rows.append({**row, "seconds": seconds + RESET_S})
        for number in range(failed):
            lost = trajectory(1000 + step, number).header()
            row = End(lost, Fate.FAILED).row(step)
            gone = {"stop": "environment_error", "turns": 0, "tokens": 0, "sampled_tokens": 0, "reward": None}
            rows.append({**row, **gone, "seconds": RESET_S})
        files.append_ends(rows)
        at = 10.0 * step
        files.append_span("engine", "generate", step, at, at + 6)
        files.append_span("trainer", "train_step", step, at + 6, at + 10)
        files.append_span("weights", "publish", step, at + 10, at + 10.5)
        files.append_span("weights", "pull", step, at + 10.5, at + 10.7)
        write_archive(store, step, step, batch)
    return folder
