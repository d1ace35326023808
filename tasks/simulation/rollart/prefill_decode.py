"""Prefill-decode disaggregation over mixed nodes (§7.4): prefill on H800 and decode on H20.

Nodes of 8 GPUs; SWE, batch 128, 32k. 1P3D is one H800 node and three H20 nodes, and so on; colocated is the
same nodes with every engine doing all of a turn.
"""

from collections.abc import Mapping

from tasks.simulation.rollart.claims import Given, Row, rests_on
from tasks.simulation.rollart.clusters import HARDWARE, cluster_of, engines
from tasks.simulation.rollart.workloads import PROFILES, campaign_of
from tasks.simulation.run import simulate

NODE = 8
BATCH, GROUP_SIZE = 128, 8
MODELS = {"32B": ("32B", 4), "30B-A3B": ("qwen3-30b-a3b", 4)}
"""Name in the catalogue, and tensor parallel size of an engine."""
PUBLISHED = {
    ("32B", "1P3D"): (722.7, 741.2),
    ("32B", "2P2D"): (701.6, 734.9),
    ("30B-A3B", "1P3D"): (294.8, 327.4),
    ("30B-A3B", "2P2D"): (251.1, 305.2),
}
"""Rollout seconds with prefill and decode apart, and together."""
NODES = {"1P3D": (1, 3), "2P2D": (2, 2), "3P1D": (3, 1)}


def rollout_seconds(model: str, prefill_nodes: int, decode_nodes: int, apart: bool, batch: int) -> float:
    """Mean time from the batch's first reset to its last reward."""
    name, tensor_parallel = MODELS[model]
    roles = ("prefill", "decode") if apart else ("both", "both")
    cluster = cluster_of(
        name,
        train=("train", 64),
        rollout=[
            engines("h800", prefill_nodes * NODE, tensor_parallel, role=roles[0]),
            engines("h20", decode_nodes * NODE, tensor_parallel, role=roles[1]),
        ],
        hardware={"train": "h800"},
        domains=["swe"],
    )
    campaign = campaign_of(
        ["swe"], groups=batch // GROUP_SIZE, group_size=GROUP_SIZE, steps=1, mode="sync_plus"
    )
    return simulate(campaign, cluster, warm_up_steps=0).stage_seconds["get_batch"]


def measure(
    models: tuple[str, ...], layouts: tuple[str, ...], batch: int
) -> dict[tuple[str, str], tuple[float, float | None]]:
    """(seconds apart, seconds together) by model and layout; together only where that is published."""
    return {
        (model, layout): (
            rollout_seconds(model, *NODES[layout], apart=True, batch=batch),
            rollout_seconds(model, *NODES[layout], apart=False, batch=batch)
            if (model, layout) in PUBLISHED
            else None,
        )
        for model in models
        for layout in layouts
    }


def table_rows(found: Mapping[tuple[str, str], tuple[float, float | None]]) -> list[Row]:
    basis = rests_on(
        HARDWARE,
        Given("SWE, batch 128, 32k; P node 8 H800, D node 8 H20", "published", "§7.4"),
        Given("engines of 4 GPUs", "inferred", "§7.1: TP 4 for 32B; unstated for 30B-A3B"),
        Given("batch 128 are trajectories; the mean of one iteration", "inferred", "unstated"),
        Given("SWE's latencies and lengths as in the 8B runs", "inferred", "the task is the same"),
        PROFILES["swe"].givens,
    )
    short = (
        "SWE's lengths are fitted to the 8B step of §3.3, and decoding of a few long contexts is quicker "
        "here than vLLM 0.8.4 is likely to have been: its cost an iteration is not published"
    )
    share = (
        "with a prefix cache a turn adds some 600 tokens, whose prefill disturbs decoding little here: less "
        "is gained by taking it away, and the decode nodes are fewer. 32B on one prefill node: its two "
        "engines hold KV of some 790,000 tokens each and the batch has up to 3 million, so evicted contexts "
        "are prefilled again and again"
    )
    rows = []
    for (model, layout), (apart, together) in found.items():
        if together is None:
            continue
        published_apart, published_together = PUBLISHED[model, layout]
        condition = f"{model}, {layout}"
        rows += [
            Row(
                "colocated over PD, rollout time",
                condition,
                published_together / published_apart,
                together / apart,
                basis,
                share,
            ),
            Row("rollout with PD, s", condition, published_apart, apart, basis, short),
            Row("rollout colocated, s", condition, published_together, together, basis, short),
        ]
    for model in dict.fromkeys(model for model, _ in found):
        by_layout = {layout: apart for (of, layout), (apart, _) in found.items() if of == model}
        if len(by_layout) < 2 or "3P1D" not in by_layout:
            continue
        others = max(seconds for layout, seconds in by_layout.items() if layout != "3P1D")
        listed = ", ".join(f"{layout} {seconds:.0f} s" for layout, seconds in by_layout.items())
        rows.append(
            Row(
                "3P1D is the slowest: its PD rollout over the slowest other",
                model,
                1.0,
                by_layout["3P1D"] / others,
                basis,
                f"ours: {listed}; where 1P3D is slower, its prefill node is short of KV",
                "at least",
            )
        )
    return rows


def rows(quick: bool = False) -> list[Row]:
    if quick:
        return table_rows(measure(("30B-A3B",), ("1P3D",), 32))
    return table_rows(measure(tuple(MODELS), tuple(NODES), BATCH))
