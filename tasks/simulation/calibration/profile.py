"""The profile of a real run: the workload that its trajectories were, and what its parts took.

    python -m tasks.simulation.calibration.profile RUN [--engines h20] [--trainer h800] [--out DIRECTORY]

writes `workload.yaml`, whose keys belong into a cluster file, and `coefficients.json`, which that file's
`coefficients` names.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from infra.hardware import UnknownHardware, hardware
from infra.model_size import ModelSize
from infra.models import model_of
from infra.object_store import ObjectStore
from infra.performance.calibrated import Calibration, Fitted
from infra.performance.distributions import Distribution, constant, of_samples
from tasks.campaign import Campaign
from tasks.report.run_files import Span
from tasks.simulation.calibration.cost_fits import Placed, fit_engine_turns, fit_training
from tasks.simulation.calibration.trace import TraceError, read_trace
from tasks.simulation.workload import DomainWorkload
from tasks.train.archive import archived_steps, read_archive
from tasks.trajectory import StopReason, Trajectory


@dataclass(frozen=True, slots=True)
class Archived:
    """A run's campaign and trained trajectories, by step."""

    campaign: Campaign
    steps: Mapping[int, Sequence[Trajectory]]

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for step in self.steps.values() for trajectory in step]


def read_archived(folder: Path) -> Archived:
    """Raises `TraceError` where a step that is on record has no archive."""
    trace = read_trace(folder)
    campaign = Campaign.load(folder / "campaign.yaml")
    store = ObjectStore(str(folder / "samples"))
    archived = archived_steps(store)
    missing = sorted({int(row["step"]) for row in trace.rows} - set(archived))
    if missing:
        raise TraceError(
            f"the trace has holes:\n  {folder / 'samples/archive'}: no trajectories of {len(missing)} of "
            f"{len(trace.rows)} steps ({', '.join(map(str, missing[:5]))}{' ...' if missing[5:] else ''})"
        )
    return Archived(campaign, {step: read_archive(store, step) for step in archived})


def workload_of_run(folder: Path) -> dict[str, DomainWorkload]:
    """The workload of each domain that the run trained on. Raises `TraceError`.

    Lengths, turns and the environments' latencies are of trained trajectories; failures are of all. A turn
    that its budget cut counts as one token longer than that: how long it would have been is not known.
    """
    archived, trace = read_archived(folder), read_trace(folder)
    domains: defaultdict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in archived.trajectories:
        domains[trajectory.domain].append(trajectory)
    seconds = {str(end["key"]): float(end["seconds"]) for end in trace.ends}
    return {
        name: _domain(
            trajectories,
            [end for end in trace.ends if end["domain"] == name],
            seconds,
            archived.campaign.domains[name].reward_range,
        )
        for name, trajectories in domains.items()
    }


def _domain(
    trajectories: Sequence[Trajectory],
    ends: Sequence[Mapping[str, Any]],
    seconds: Mapping[str, float],
    reward_range: tuple[float, float],
) -> DomainWorkload:
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    responses = [turn.response_end - turn.response_start + (turn.stop is StopReason.LENGTH) for turn in turns]
    observations = [
        after.response_start - before.response_end
        for trajectory in trajectories
        for before, after in pairwise(trajectory.turns)
    ]
    apart = [
        seconds[str(each.key)] - sum(turn.generate_seconds + turn.environment_seconds for turn in each.turns)
        for each in trajectories
        if str(each.key) in seconds
    ]
    low, high = reward_range
    rewards = [float(end["reward"]) for end in ends if end.get("reward") is not None]
    failed = [end for end in ends if str(end["stop"]).startswith("environment")]
    before_any_turn = sum(not end["turns"] for end in failed)
    return DomainWorkload(
        prompt_tokens=_measured([each.turns[0].response_start for each in trajectories if each.turns]),
        turns=_measured([len(each.turns) for each in trajectories]),
        response_tokens=_measured(responses),
        observation_tokens=_measured(observations) if observations else constant(1),
        reset_s=_measured([max(value, 0.0) for value in apart]),
        step_s=_measured([turn.environment_seconds for turn in turns]),
        reset_failure=before_any_turn / len(ends),
        step_failure=(len(failed) - before_any_turn) / max(sum(int(end["turns"]) for end in ends), 1),
        success=min(max((statistics.fmean(rewards) - low) / (high - low), 0.0), 1.0) if rewards else 0.5,
        group_share=group_share(trajectories),
    )


def _measured(values: Sequence[float]) -> Distribution:
    return of_samples([float(value) for value in values])


def group_share(trajectories: Sequence[Trajectory]) -> float:
    """Share of the variance of sampled tokens that members of a group have in common: the intraclass
    correlation of a one-way analysis of variance, no less than 0."""
    groups: defaultdict[int, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.key.group].append(float(trajectory.sampled_tokens))
    members = [values for values in groups.values() if len(values) > 1]
    if len(members) < 2:
        return 0.0
    count = sum(map(len, members))
    size = (count - sum(len(values) ** 2 for values in members) / count) / (len(members) - 1)
    grand = sum(map(sum, members)) / count
    means = [statistics.fmean(values) for values in members]
    between = sum(len(values) * (mean - grand) ** 2 for values, mean in zip(members, means, strict=True)) / (
        len(members) - 1
    )
    within = sum(
        (value - mean) ** 2 for values, mean in zip(members, means, strict=True) for value in values
    ) / (count - len(members))
    total = between + (size - 1) * within
    return min(max((between - within) / total, 0.0), 1.0) if total > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    """What a run says for simulations of others like it."""

    workload: dict[str, DomainWorkload]
    calibration: Calibration
    weights: dict[str, Any]
    """Options of a cluster's `weights` that take as long as publications did."""

    def save(self, folder: Path) -> None:
        """Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        self.calibration.save(folder / "coefficients.json")
        text = yaml.safe_dump(
            {
                "workload": {
                    name: domain.model_dump(mode="json", exclude_none=True)
                    for name, domain in self.workload.items()
                },
                "weights": self.weights,
                "coefficients": str((folder / "coefficients.json").resolve()),
            },
            sort_keys=False,
        )
        (folder / "workload.yaml").write_text(text)


def profile_run(folder: Path, engines: Placed, trainer: Placed, size: ModelSize | None = None) -> Profile:
    """Workload and coefficients of a run whose engines and trainer were on this hardware.

    `size` is that of the campaign's own model by default. Raises `TraceError`.
    """
    trace, archived = read_trace(folder), read_archived(folder)
    size = size or model_of(archived.campaign.model.path or str(folder / "model"))
    spans = [span for span in trace.spans if span.stage == "train_step"]
    steps = [
        ([len(each.tokens) for each in archived.steps[span.step]], span.seconds)
        for span in spans
        if span.step in archived.steps
    ]
    generating = sum(span.seconds for span in trace.spans if span.stage == "generate")
    engine = fit_engine_turns(size, engines, archived.trajectories, generating)
    fitted = {engines.hardware.name: engine}
    together = trainer.hardware.name == engines.hardware.name
    training = fit_training(size, trainer, steps, engine if together else Fitted())
    if together:
        fitted[engines.hardware.name] = engine.model_copy(
            update={"training": training.training, "residuals": engine.residuals | training.residuals}
        )
    else:
        fitted[trainer.hardware.name] = training
    return Profile(
        workload_of_run(folder),
        Calibration(
            name=folder.name,
            fitted_on=f"{len(steps)} train steps, {len(archived.trajectories)} trajectories of {folder.name}",
            hardware=fitted,
        ),
        publication(trace.spans, size.weight_bytes),
    )


def publication(spans: Sequence[Span], size_bytes: float) -> dict[str, Any]:
    """Options of `weights` of a cluster by which a push, a pull and an update take their medians of these."""

    def rate(stage: str) -> float | None:
        seconds = [span.seconds for span in spans if span.stage == stage and span.seconds > 0]
        return size_bytes / 1e9 / statistics.median(seconds) if seconds else None

    found = {"push_gb_s": rate("publish"), "pull_gb_s": rate("pull"), "device_gb_s": rate("update")}
    return {
        "transport": "store",
        "latency_s": 0.0,
        **{name: value for name, value in found.items() if value is not None},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--engines", default="cpu", help="hardware of the engines, by its catalogue name")
    parser.add_argument("--workers", type=int, default=1, help="engines")
    parser.add_argument("--trainer", default="cpu", help="hardware of the trainer")
    parser.add_argument("--trainer-devices", type=int, default=1)
    parser.add_argument("--out", type=Path, help="where the files go; by default the run's folder")
    options = parser.parse_args()
    try:
        profile = profile_run(
            options.run,
            Placed(hardware(options.engines), options.workers),
            Placed(hardware(options.trainer), options.trainer_devices),
        )
    except (TraceError, UnknownHardware) as error:
        parser.exit(2, f"{error}\n")
    out = options.out or options.run / "profile"
    profile.save(out)
    print(
        f"{out / 'workload.yaml'} and {out / 'coefficients.json'}, fitted on {profile.calibration.fitted_on}"
    )


if __name__ == "__main__":
    main()
