"""Step time as the bound on staleness grows (Fig. 13): RollArt's own clusters, alpha 1 to 4.

The paper goes to 6 and finds a plateau; ours is flat from 4 on.
"""

from tasks.simulation.rollart.claims import Row, rests_on
from tasks.simulation.rollart.clusters import MAIN_CLUSTER
from tasks.simulation.rollart.modes import MAIN_CAMPAIGN, REDUNDANCY, Length, run_mode, scale
from tasks.simulation.rollart.workloads import MAIN, givens_of

AT_BEST = {"8B": 1.22, "14B": 1.17, "32B": 1.14}
ALPHAS = (1, 2, 4)
LENGTHS = {
    "8B": (Length(warm_up=5, steps=4, share=4), ALPHAS),
    "14B": (Length(warm_up=5, steps=4, share=4), ALPHAS),
    "32B": (Length(warm_up=3, steps=2, share=2), (1, 2)),
}
"""What is simulated of each model. A larger alpha begins with more in flight: the warm-up is as long."""
QUICK = {"8B": (Length(warm_up=1, steps=1, share=8), (1, 2))}


REASON = (
    "Beyond alpha 2 a step lasts what training, push and pull take, which alpha does not shorten: the gain "
    "is how much longer the rollout of alpha 1 is, much at 8B and nothing at 32B. Lengths, which decide "
    "that, are not published"
)


def sweep(model: str, alphas: tuple[int, ...], length: Length) -> dict[int, float]:
    """Step seconds by alpha."""
    return {alpha: run_mode(model, "tutti", length, alpha).step_seconds for alpha in alphas}


def rows(quick: bool = False) -> list[Row]:
    found = []
    for model, (length, alphas) in (QUICK if quick else LENGTHS).items():
        seconds = sweep(model, alphas, length)
        ours = {alpha: seconds[1] / taken for alpha, taken in seconds.items()}
        listed = ", ".join(f"{alpha}: {gain:.2f}" for alpha, gain in ours.items())
        found.append(
            Row(
                "step time of alpha 1 over that of the best alpha",
                f"{model}, alpha {' '.join(map(str, alphas))}",
                AT_BEST[model],
                max(ours.values()),
                rests_on(MAIN_CAMPAIGN, REDUNDANCY, MAIN_CLUSTER, scale(length), givens_of(MAIN[model])),
                f"by alpha {listed}. {REASON}",
            )
        )
    return found
