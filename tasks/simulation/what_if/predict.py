"""One candidate, simulated: what a campaign is predicted to do on a cluster."""

from pathlib import Path

from tasks.campaign import Campaign
from tasks.simulation.cluster import ClusterConfig
from tasks.simulation.run import simulate
from tasks.simulation.what_if.prediction import Prediction
from tasks.train.modes import MODES

STEPS = 5
"""Train steps that a prediction is the mean of."""


def warm_up_steps(campaign: Campaign) -> int:
    """Steps to leave out of means. Where rollout overlaps training, the alpha + 1 batches that are begun at
    once arrive at once, so the first steps are quicker than any that follow."""
    train = campaign.train
    return train.alpha + 1 if MODES[train.mode].overlaps_training else 1


def shortened(campaign: Campaign, steps: int) -> Campaign:
    """The campaign with so many train steps, and nothing around these: no evaluation, no plan."""
    train = campaign.train.model_copy(update={"steps": steps})
    evaluation = campaign.evaluation.model_copy(update={"every": 0})
    return campaign.model_copy(update={"train": train, "evaluation": evaluation, "plan": None})


def predict(
    campaign: Campaign,
    cluster: ClusterConfig,
    *,
    steps: int = STEPS,
    warm_up: int | None = None,
    folder: Path | None = None,
) -> Prediction:
    """Simulate `steps` train steps after `warm_up` ones (`warm_up_steps`, where nothing is said), whatever
    the campaign's own number is.

    With `folder` the simulated run's files lie there. Raises `ClusterError`.
    """
    left_out = warm_up_steps(campaign) if warm_up is None else warm_up
    result = simulate(shortened(campaign, left_out + steps), cluster, folder=folder, warm_up_steps=left_out)
    return Prediction.of(result, cluster.usd_per_hour)
