"""Weights across clusters: RollArt's Tables 3 and 4, and the step time that asynchronous publication saves.

No size of a table is predicted from itself: a transport is fitted to the two *other* sizes of its table. The
step times are simulated, on the two clusters of §7.1 with Ethernet between them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from infra.models import model_of
from tasks.simulation.result import SimulationResult
from tasks.simulation.rollart.claims import Given, Row, extremes, rests_on
from tasks.simulation.rollart.clusters import MAIN_CLUSTER, affine
from tasks.simulation.rollart.clusters import MODELS as CATALOGUE
from tasks.simulation.rollart.workloads import MAIN, campaign_of, givens_of
from tasks.simulation.run import simulate

MODELS = ("8B", "14B", "32B")
GIB = 2**30 / 1e9
"""The tables' GB are 2**30 bytes: Qwen3-8B's 8.19 billion parameters in bfloat16 are 15.26 of these."""
SIZES_GB = {"8B": 15.26, "14B": 27.51, "32B": 61.02}
TABLE_3 = {
    "NCCL over TCP, 200 GbE": {"8B": 6.911, "14B": 14.437, "32B": 29.649},
    "NCCL over RDMA, 400 Gb/s": {"8B": 5.466, "14B": 5.817, "32B": 9.442},
}
TABLE_4 = {
    "push to Mooncake": {"8B": 32.4, "14B": 67.8, "32B": 127.3},
    "accumulated pull": {"8B": 6.2, "14B": 16.3, "32B": 29.7},
}
EXPOSED_PULL = {"8B": 1.4, "14B": 5.1, "32B": 9.6}

Form = Literal["proportional", "line"]
FORMS: dict[str, Form] = {
    "NCCL over TCP, 200 GbE": "proportional",
    "NCCL over RDMA, 400 Gb/s": "line",
    "push to Mooncake": "proportional",
    "accumulated pull": "proportional",
}
"""RDMA has a set-up (memory registration, queue pairs) that is long beside its transfer; a stream over
Ethernet has none that these seconds would show."""


@dataclass(frozen=True, slots=True)
class Line:
    """seconds = latency + bytes / bandwidth."""

    latency_s: float
    gb_per_s: float  # 10**9 bytes a second

    def seconds(self, gb: float) -> float:
        return self.latency_s + gb / self.gb_per_s

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]], form: Form) -> "Line":
        """Least squares through (GB, seconds), without a latency where `form` is proportional."""
        if form == "proportional":
            slope = sum(gb * seconds for gb, seconds in points) / sum(gb * gb for gb, _ in points)
            return cls(0.0, 1 / slope)
        count = len(points)
        mean_gb = sum(gb for gb, _ in points) / count
        mean_s = sum(seconds for _, seconds in points) / count
        slope = sum((gb - mean_gb) * (seconds - mean_s) for gb, seconds in points) / sum(
            (gb - mean_gb) ** 2 for gb, _ in points
        )
        return cls(mean_s - slope * mean_gb, 1 / slope)


def without(model: str, table: Mapping[str, float], form: Form) -> Line:
    """The transport as the other sizes of the table show it."""
    return Line.through([(SIZES_GB[other], table[other]) for other in MODELS if other != model], form)


def transfer_rows() -> list[Row]:
    rows = []
    for number, published in ((3, TABLE_3), (4, TABLE_4)):
        for transport, table in published.items():
            for model in MODELS:
                others = " and ".join(other for other in MODELS if other != model)
                line = without(model, table, FORMS[transport])
                ours = line.seconds(SIZES_GB[model])
                note = ""
                if abs(ours / table[model] - 1) > 0.10:
                    note = _crooked(table)
                rows.append(
                    Row(
                        f"Table {number}: {transport}, s",
                        f"{model}, {SIZES_GB[model]} GB",
                        table[model],
                        ours,
                        rests_on(
                            Given(f"{SIZES_GB[model]} GB of weights", "published", "Table 3"),
                            Given(
                                f"{line.latency_s:.2f} s + GB / {line.gb_per_s:.2f}",
                                "fitted",
                                f"to the table's {others}, not to {model}",
                            ),
                        ),
                        note,
                    )
                )
    return rows


def _crooked(table: Mapping[str, float]) -> str:
    rates = ", ".join(f"{model} {SIZES_GB[model] / table[model]:.2f}" for model in MODELS)
    return (
        f"the published GB/s ({rates}) are no function of size that a latency and a bandwidth can follow, "
        "so no size follows from the other two more closely"
    )


SHARES = {"8B": 4, "14B": 4, "32B": 2}
"""Simulated is this part of the cluster with this part of the batch: each engine's load stays as it is."""


def _run(model: str, weights: Mapping[str, Any], steps: int, share: int) -> SimulationResult:
    cluster = affine(model, share, domains=MAIN[model], weights=weights)
    campaign = campaign_of(MAIN[model], groups=64 // share, group_size=8, steps=steps)
    return simulate(campaign, cluster, warm_up_steps=min(2, steps - 1))


def synchronous(model: str) -> dict[str, Any]:
    """A broadcast for which trainer and engines wait, as long as Table 3 has it over Ethernet."""
    seconds = TABLE_3["NCCL over TCP, 200 GbE"][model]
    bytes_ = model_of(CATALOGUE[model]).weight_bytes
    return {"transport": "nccl", "latency_s": 0.0, "pull_gb_s": bytes_ / 1e9 / seconds}


def asynchronous(model: str) -> dict[str, Any]:
    """The store, at the rates that Table 4 shows for the other sizes."""
    push, pull = (
        without(model, TABLE_4[part], FORMS[part]).gb_per_s * GIB
        for part in ("push to Mooncake", "accumulated pull")
    )
    return {"transport": "mooncake", "latency_s": 0.0, "push_gb_s": push, "pull_gb_s": pull}


def step_rows(models: Sequence[str], steps: int, shares: Mapping[str, int]) -> list[Row]:
    """Exposed pull, and step time with the synchronous broadcast over that with the store."""
    basis = rests_on(
        MAIN_CLUSTER[:4],
        Given("synchronous: Table 3's seconds over TCP", "published", "Table 3"),
        Given("store: push and pull at the rates of the other sizes", "fitted", "Table 4, other sizes"),
        Given("from host memory into each GPU at 25 GB/s", "inferred", "PCIe 5, cautious"),
        Given(
            "a part of every pool with that part of the batch", "inferred", "each engine's load is the same"
        ),
        Given("batch 512 are trajectories", "inferred", "unstated"),
        givens_of({domain for model in models for domain in MAIN[model]}),
    )
    found, gains, parts = [], {}, []
    for model in models:
        stored = _run(model, asynchronous(model), steps, shares[model])
        broadcast = _run(model, synchronous(model), steps, shares[model])
        gains[model] = broadcast.step_seconds / stored.step_seconds
        stages = [stored.stage_seconds[stage] for stage in ("train_step", "publish", "pull")]
        parts.append(
            f"{model} {stages[0]:.0f} + {stages[1]:.0f} + {stages[2]:.0f} of {stored.step_seconds:.0f} s"
        )
        found.append(
            Row(
                "Table 4: exposed pull, s",
                model,
                EXPOSED_PULL[model],
                stored.stage_seconds["update"],
                basis,
                "ours is what generation stands still for: putting pulled weights in place. The paper does "
                "not say which part of a pull it could not hide",
            )
        )
    published = (1.10, 1.16)
    return [
        *found,
        *extremes(
            "asynchronous over synchronous weights",
            "step time, alpha 1",
            published,
            gains,
            basis,
            "a version cannot be served before training, push and pull are over, one after the other: "
            f"{', '.join(parts)}. A push is hidden only by rollout that lasts longer than these; the "
            "published savings of 37, 79 and 147 s (Table 4) would be 10 to 16 % of steps of 230 to 1,500 s",
        ),
    ]


def rows(quick: bool = False) -> list[Row]:
    if quick:
        return [*transfer_rows(), *step_rows(["8B"], 2, {"8B": 8})]
    return [*transfer_rows(), *step_rows(MODELS, 4, SHARES)]
