"""Step time over the number of GPUs (§7.2): 14B on 64, 96 and 128 H800, alpha 1, no affinity."""

from tasks.simulation.rollart.claims import Given, Row, extremes, rests_on
from tasks.simulation.rollart.clusters import FUNCTIONS, MAIN_CLUSTER, baseline
from tasks.simulation.rollart.modes import (
    MAIN_CAMPAIGN,
    NAMES,
    QUICK,
    REDUNDANCY,
    Length,
    main_campaign,
    scale,
    steady,
)
from tasks.simulation.rollart.workloads import MAIN, givens_of
from tasks.train.modes import ModeName

FULL = {
    64: Length(warm_up=2, steps=4, share=4),
    96: Length(warm_up=2, steps=4, share=2),  # six GPUs would not split the training state
    128: Length(warm_up=2, steps=4, share=4),
}
MODES: tuple[ModeName, ...] = ("sync_plus", "one_off", "areal", "tutti")
PUBLISHED = (1.33, 2.08)
REASON = (
    "without affinity RollArt differs from AReaL only in what it gives up for being too old, which saves no "
    "time; what makes it 1.33 times as fast in the paper is not said"
)


def step_seconds(model: str, gpus: int, mode: ModeName, length: Length) -> float:
    cluster = baseline(model, gpus // length.share, domains=MAIN[model], reward=FUNCTIONS)
    campaign = main_campaign(model, mode, length)
    return steady(campaign, cluster, length).step_seconds


def rows(quick: bool = False) -> list[Row]:
    model, sizes = ("8B", {128: QUICK["8B"]}) if quick else ("14B", FULL)
    ours = {}
    for gpus, length in sizes.items():
        taken = {mode: step_seconds(model, gpus, mode, length) for mode in MODES}
        for mode in MODES[:-1]:
            ours[f"{gpus} over {NAMES[mode]}"] = taken[mode] / taken["tutti"]
    basis = rests_on(
        MAIN_CAMPAIGN,
        REDUNDANCY,
        MAIN_CLUSTER,
        map(scale, sizes.values()),
        Given("64, 96 and 128 H800, alpha 1, no affinity", "published", "§7.2"),
        Given("a quarter of the GPUs train", "inferred", "as 32 of 128"),
        givens_of(MAIN[model]),
    )
    condition = f"{model}, {'/'.join(map(str, sizes))} H800, alpha 1"
    return extremes("RollArt over its baselines", condition, PUBLISHED, ours, basis, REASON)
