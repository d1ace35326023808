"""Step times of RollArt and its baselines (§7.2): the project's own five modes on the paper's clusters.

Baselines run on 128 H800; RollArt on 96 H800 and 32 H20, with its domains bound to them and with redundancy.
"""

from dataclasses import dataclass

from tasks.campaign import Campaign
from tasks.simulation.cluster import ClusterConfig
from tasks.simulation.result import SimulationResult
from tasks.simulation.rollart.claims import Given, Row, extremes, rests_on
from tasks.simulation.rollart.clusters import DEDICATED, FUNCTIONS, MAIN_CLUSTER, affine, baseline
from tasks.simulation.rollart.workloads import MAIN, campaign_of, givens_of
from tasks.simulation.run import simulate
from tasks.train.modes import MODES as POLICIES
from tasks.train.modes import ModeName

GROUPS, GROUP_SIZE = 64, 8
MODES: tuple[ModeName, ...] = ("sync", "sync_plus", "one_off", "areal", "tutti")
NAMES = {"sync": "Sync", "sync_plus": "Sync+", "one_off": "One-off", "areal": "AReaL", "tutti": "RollArt"}
MAIN_CAMPAIGN = (
    Given("batch 512, groups of 8, domains drawn uniformly", "published", "§7.1"),
    Given(
        "512 are trajectories, 64 groups of 8",
        "inferred",
        "unstated whether prompts or responses; chosen knowing that with 4,096 trajectories training "
        "outlasts rollout (258 s against 149 at 8B), which One-off over Sync+ speaks against",
    ),
)
REDUNDANCY = Given(
    "RollArt starts 34 groups for 32, and 10 members for 8",
    "inferred",
    "§6.3: redundant environments are RollArt's, how many in its main runs is unstated; the middle of its "
    "own grid. Without affinity it is 1.33 times as fast as AReaL (§7.2), for which nothing else is left. "
    "Taken after a look at the modes without it: there RollArt over AReaL was 1.04, 0.93 and 0.67",
)
MORE_MEMBERS, ONE_MORE_GROUP_IN = 2, 16


@dataclass(frozen=True, slots=True)
class Length:
    """How much is simulated."""

    warm_up: int
    steps: int
    share: int = 1
    """Batch and GPUs are divided by this."""


FULL = {
    "8B": Length(warm_up=2, steps=4, share=4),
    "14B": Length(warm_up=2, steps=4, share=4),
    "32B": Length(warm_up=2, steps=4, share=2),  # the least on which its training state fits
}
QUICK = {"8B": Length(warm_up=1, steps=1, share=8)}


def lengths(quick: bool) -> dict[str, Length]:
    """How much of each model is simulated."""
    return QUICK if quick else FULL


def scale(length: Length) -> Given:
    what = (
        f"1/{length.share} of the batch and of the GPUs; mean of {length.steps} steps after {length.warm_up}"
    )
    return Given(what, "inferred", "as much work a GPU as in the whole, at a part of the simulation's time")


def main_campaign(model: str, mode: ModeName, length: Length, alpha: int | None = None) -> Campaign:
    """With alpha steps more than are looked at: in a campaign's last ones nothing new is begun."""
    if alpha is None:
        alpha = 1 if POLICIES[mode].overlaps_training else 0
    groups = GROUPS // length.share
    more = (-(-groups // ONE_MORE_GROUP_IN), MORE_MEMBERS) if mode == "tutti" else (0, 0)
    return campaign_of(
        MAIN[model],
        groups=groups,
        group_size=GROUP_SIZE,
        steps=length.warm_up + length.steps + alpha,
        mode=mode,
        alpha=alpha,
        redundancy=more,
    )


def main_cluster(model: str, mode: ModeName, length: Length) -> ClusterConfig:
    """RollArt's two clusters for mode tutti, 128 H800 for its baselines; Sync has a reward model on GPUs."""
    domains = MAIN[model]
    if mode == "tutti":
        return affine(model, share=length.share, domains=domains)
    reward = DEDICATED if mode == "sync" else FUNCTIONS
    return baseline(model, 128 // length.share, domains=domains, reward=reward)


def run_mode(model: str, mode: ModeName, length: Length, alpha: int | None = None) -> SimulationResult:
    campaign = main_campaign(model, mode, length, alpha)
    return steady(campaign, main_cluster(model, mode, length), length)


def steady(campaign: Campaign, cluster: ClusterConfig, length: Length) -> SimulationResult:
    """Without the steps in which the pipeline fills and drains."""
    return simulate(campaign, cluster, warm_up_steps=length.warm_up, cool_down_steps=campaign.train.alpha)


def step_seconds(model: str, length: Length) -> dict[str, float]:
    """Of every mode, by its name in the paper."""
    return {NAMES[mode]: run_mode(model, mode, length).step_seconds for mode in MODES}


CLAIMS = (
    ("Sync+", "Sync", (1.40, 2.40)),
    ("One-off", "Sync+", (1.31, 1.47)),
    ("AReaL", "One-off", (1.03, 1.06)),
    ("RollArt", "AReaL", (1.22, 1.36)),
    ("RollArt", "Sync", (2.65, 4.58)),
)
AT_32B = (
    ("RollArt", "Sync+", 2.05),
    ("RollArt", "One-off", 1.35),
    ("RollArt", "AReaL", 1.31),
    ("One-off", "Sync+", 1.52),
)
EXPOSED = (
    "At 32B RollArt's update waits for training, push and pull one after the other, some 350 s in all, where "
    "a rollout takes 300: in the paper rollout hides them, so it lasts longer than what Table 1, the context "
    "and §3.3 let us infer. And an H20 decodes as fast as an H800 here (3.1 TB/s reached, against 2.9 for "
    "weights and 3.2 for KV), so among equally many GPUs affinity only keeps prefill out of decode's way. "
    "What is above the paper's is redundancy's: its amount is inferred"
)
REASONS: dict[tuple[str, str], str] = {
    ("Sync+", "Sync"): "ours lie within the published range, whose ends are of unnamed models",
    ("One-off", "Sync+"): (
        "(rollout + training) over the longer of both: 1.31 to 1.47 imply a training of a third to a half of "
        "the rollout, where ours has a sixth (8B) to six tenths (32B)"
    ),
    **{("RollArt", slower): EXPOSED for slower in ("Sync", "Sync+", "One-off", "AReaL")},
}
"""Why ratios miss, by (faster, slower)."""


def rows(quick: bool = False) -> list[Row]:
    chosen = lengths(quick)
    seconds = {model: step_seconds(model, length) for model, length in chosen.items()}
    domains = MAIN[list(chosen)[-1]]
    basis = rests_on(MAIN_CAMPAIGN, REDUNDANCY, MAIN_CLUSTER, map(scale, chosen.values()), givens_of(domains))
    found: list[Row] = []
    for faster, slower, published in CLAIMS:
        ours = {model: times[slower] / times[faster] for model, times in seconds.items()}
        reason = REASONS.get((faster, slower), "")
        found += extremes(f"{faster} over {slower}", "/".join(chosen), published, ours, basis, reason)
    if "32B" in seconds:
        times = seconds["32B"]
        for faster, slower, figure in AT_32B:
            ratio = times[slower] / times[faster]
            reason = REASONS.get((faster, slower), "")
            found.append(Row(f"{faster} over {slower}", "32B, alpha 1", figure, ratio, basis, reason))
    return found
