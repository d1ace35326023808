"""Validation on this machine: calibrate on short runs of the real system, then predict other campaigns.

    python -m tasks.simulation.calibration.this_machine [--steps N] [--only NAME ...] [--out FILE]

Two small campaigns of mode sync_plus, a small and a larger batch, are run for real, engine and trainer also
by themselves, and what their processes compute is read: CPU seconds a unit of work. Campaigns of another
batch, mode, alpha or latency are then simulated, each process on its share of the cores, and run for real
beside that. Nothing is fitted to the runs that are predicted. The machine should have nothing else to do; on
two cores it takes about six minutes.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from infra.processes import ServiceProcess
from tasks.campaign import Campaign
from tasks.open_session import open_session
from tasks.report.run_files import RunFiles
from tasks.run_folder import RunFolder
from tasks.simulation.calibration.machine_fit import Calibrated, calibrate
from tasks.simulation.calibration.parts_alone import measure_engine, measure_sharing, measure_trainer
from tasks.simulation.calibration.profile import read_archived
from tasks.simulation.calibration.readings import Reading, taking_readings
from tasks.simulation.cluster import ClusterConfig
from tasks.simulation.run import simulate
from tasks.train.loop import directly, train_loop

WARM_UP_STEPS = 3
TURNS, TURN_TOKENS, TOKENS = 4, 16, 256
GOAL = 0.10
"""Largest deviation of a step time that the validation is held to."""


@dataclass(frozen=True, slots=True)
class Case:
    """A campaign by what differs between the campaigns of this validation. Times in milliseconds."""

    name: str
    mode: str = "sync_plus"
    alpha: int = 0
    groups: int = 6
    mean_ms: float = 50.0
    sigma_ms: float = 0.0
    group_size: int = 6

    def campaign(self, runs: Path, steps: int, model: Path | None = None) -> Campaign:
        domain = {
            "source": "tasks.simulation.calibration.waiting:WaitingTurns",
            "options": {
                "turns": TURNS,
                "mean_ms": self.mean_ms if model else 0.0,
                "sigma_ms": self.sigma_ms,
            },
            "max_turns": TURNS,
            "max_turn_tokens": TURN_TOKENS,
            "max_tokens": TOKENS,
            "step_limit_s": 60.0,
        }
        return Campaign.parse(
            {
                "name": "this-machine",
                "model": {"path": str(model) if model else None, "warm_up": {"steps": 0}},
                "domains": {"waiting": domain},
                "stores": {"runs": str(runs), "evict_samples": False},
                "environment": {"concurrent_trajectories": 1024},
                "train": {
                    "steps": steps,
                    "groups": self.groups,
                    "group_size": self.group_size,
                    "mode": self.mode,
                    "alpha": self.alpha,
                    "algorithm": {"kind": "grpo", "zero_variance": "keep"},
                    "trainer": {"learning_rate": 1e-5},
                    "checkpoint": {"every": 1_000_000},
                },
                "trackers": {"tensorboard": False, "prefect_artifacts": False, "report": False},
            }
        )


CALIBRATION = (Case("half the batch", groups=3), Case("base"))
PREDICTED = (
    Case("twice the batch", groups=12),
    Case("latency of 200 ms", mean_ms=200.0),
    Case("latency of N(100, 50) ms, lockstep", mode="sync", mean_ms=100.0, sigma_ms=50.0),
    Case("one_off", mode="one_off", alpha=1),
    Case("areal, alpha 1", mode="areal", alpha=1),
    Case("tutti, alpha 1", mode="tutti", alpha=1),
    Case("tutti, alpha 3, latency of 200 ms", mode="tutti", alpha=3, mean_ms=200.0),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds of a step after the warm-up, and means of its stages."""

    step_seconds: float
    stages: dict[str, float]


@dataclass(frozen=True, slots=True)
class Compared:
    case: str
    predicted: Outcome
    measured: Outcome

    @property
    def deviation(self) -> float:
        return self.predicted.step_seconds / self.measured.step_seconds - 1


async def run_for_real(campaign: Campaign, run: str) -> tuple[Path, list[Reading]]:
    """Train the campaign's steps; returns the run's folder and what was read of its processes."""
    folder = RunFolder.of(campaign, run)
    folder.begin(campaign, resume=False)
    async with open_session(campaign, folder) as session, taking_readings(session) as readings:
        await train_loop(session, directly(session))
    return folder.root, readings


async def build_model(runs: Path) -> Path:
    """The small Llama that the project builds, without warm-up."""
    campaign = CALIBRATION[0].campaign(runs, 1)
    folder = RunFolder.of(campaign, "model")
    folder.begin(campaign, resume=False)
    process = await ServiceProcess.start(
        "prepare",
        "tasks.model.prepare",
        {"campaign": campaign.model_dump(mode="json"), "model": str(folder.model)},
        folder.logs / "prepare.log",
        environment={"OMP_NUM_THREADS": "2"},
        start_limit_s=600,
    )
    await process.stop()
    return folder.model


def measured(folder: Path, warm_up: int = WARM_UP_STEPS) -> Outcome:
    """The median step, since a machine is never quite undisturbed."""
    files = RunFiles(folder)
    ends = [float(row["time"]) for row in files.read_metrics()]
    seconds = [after - before for before, after in pairwise(ends)][warm_up - 1 :]
    stages: dict[str, list[float]] = {}
    for span in files.read_spans():
        if span.step >= warm_up:
            stages.setdefault(span.stage, []).append(span.seconds)
    return Outcome(
        statistics.median(seconds), {stage: statistics.median(each) for stage, each in stages.items()}
    )


def predict(case: Case, calibrated: Calibrated, model: Path, folder: Path, steps: int) -> Outcome:
    """Simulate the case by the calibration, as `measured` does with a real run."""
    campaign = case.campaign(folder, steps, model)
    coefficients = folder / "coefficients.json"
    calibrated.calibration.save(coefficients)
    cluster = cluster_of(case, calibrated, model, coefficients)
    run = folder / case.name.replace(" ", "-").replace(",", "")
    simulate(campaign, cluster, folder=run, warm_up_steps=WARM_UP_STEPS)
    return measured(run)


def cluster_of(case: Case, calibrated: Calibrated, model: Path, coefficients: Path) -> ClusterConfig:
    """This machine as a cluster. What is not measured is what the campaign says: turns, lengths, latency."""
    lengths = calibrated.workload["waiting"]
    workload = lengths.model_dump(mode="json", exclude_none=True)
    engine = calibrated.engine_options
    return ClusterConfig.parse(
        {
            "name": "this-machine",
            "model": str(model),
            "pools": {"cores": {"hardware": "cpu", "devices": 4}},
            "rollout": [{"pool": "cores", "devices": 1, "block_tokens": 1, **engine}],
            "train": {"pool": "cores", "devices": 1},
            "environment": {"pool": "cores", "places": 1024},
            "weights": calibrated.weights,
            "workload": {
                "waiting": {
                    **workload,
                    "reset_s": 0.0,
                    "step_s": {"normal": {"mean": case.mean_ms / 1000, "std": case.sigma_ms / 1000}},
                }
            },
            "coefficients": str(coefficients),
        }
    )


def table(compared: list[Compared]) -> str:
    """Predicted beside measured, in lines."""
    width = max(len(each.case) for each in compared)
    lines = [f"{'campaign':{width}}  predicted s  measured s  deviation  within {GOAL:.0%}"]
    lines += [
        f"{each.case:{width}}  {each.predicted.step_seconds:11.3f}  {each.measured.step_seconds:10.3f}  "
        f"{each.deviation:+9.1%}  {'yes' if abs(each.deviation) <= GOAL else 'no'}"
        for each in compared
    ]
    return "\n".join(lines)


def validate(
    cases: tuple[Case, ...], steps: int, runs: Path, say: Callable[[str], None]
) -> tuple[Calibrated, list[Compared]]:
    """Calibrate, and compare each case. Takes a process tree a run, one after the other."""
    model = asyncio.run(build_model(runs))
    found = []
    for case in CALIBRATION:
        campaign = case.campaign(runs, steps, model)
        folder, readings = asyncio.run(run_for_real(campaign, f"calibration-{case.groups}"))
        found.append((folder, readings))
        say(f"calibration, {case.name}: {measured(folder).step_seconds:.3f} s a step")
    engine = asyncio.run(measure_engine(model, TOKENS))
    trained = [list(read_archived(folder).steps[WARM_UP_STEPS]) for folder, _ in found]
    twice = [*trained[-1], *trained[-1]]
    trainer = measure_trainer(CALIBRATION[-1].campaign(runs, steps, model), model, [*trained, twice])
    cores = len(os.sched_getaffinity(0))
    calibrated = calibrate(found, engine, trainer, model, WARM_UP_STEPS, cores, measure_sharing(cores))
    say(calibrated.calibration.model_dump_json(indent=2))
    compared = []
    for number, case in enumerate([*CALIBRATION, *cases]):
        predicted = predict(case, calibrated, model, runs / "simulated", steps)
        if number < len(CALIBRATION):
            real = measured(found[number][0])
        else:
            campaign = case.campaign(runs, steps, model)
            real = measured(asyncio.run(run_for_real(campaign, f"case-{number}"))[0])
        compared.append(Compared(case.name, predicted, real))
        say(table(compared[-1:]))
    return calibrated, compared


def as_json(calibrated: Calibrated, compared: list[Compared]) -> dict[str, Any]:
    return {
        "calibration": calibrated.calibration.model_dump(mode="json"),
        "weights": calibrated.weights,
        "cases": [{**asdict(each), "deviation": each.deviation} for each in compared],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=14, help=f"of each run, {WARM_UP_STEPS} of them warm-up")
    parser.add_argument("--only", nargs="+", choices=[case.name for case in PREDICTED])
    parser.add_argument("--out", type=Path, help="a JSON file for all that was found")
    options = parser.parse_args()
    cases = tuple(case for case in PREDICTED if options.only is None or case.name in options.only)
    with tempfile.TemporaryDirectory(prefix="tutti-this-machine-") as runs:
        calibrated, compared = validate(
            cases, options.steps, Path(runs), lambda text: print(text, flush=True)
        )
    print("\nThe first two are what was calibrated on, the others are predicted:")
    print(table(compared))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(as_json(calibrated, compared), indent=2) + "\n")


if __name__ == "__main__":
    main()
