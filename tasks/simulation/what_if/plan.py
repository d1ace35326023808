"""A campaign's plan: the campaign simulated on the cluster it names, before it starts."""

from pathlib import Path
from tempfile import TemporaryDirectory

from infra.config import Config
from tasks.campaign import Campaign, CampaignError
from tasks.report.measures import Measures
from tasks.report.run_files import RunFiles
from tasks.simulation.cluster import ClusterConfig, ClusterError
from tasks.simulation.fitting import fit
from tasks.simulation.what_if.plan_config import PlanConfig
from tasks.simulation.what_if.predict import predict, warm_up_steps
from tasks.simulation.what_if.prediction import Prediction


class PlanRefused(CampaignError):
    """The plan predicts more than one of its limits. The message names limit and numbers."""


class Plan(Config):
    """As `plan.json` keeps it."""

    cluster: str
    warm_up_steps: int
    campaign_steps: int
    usd: float
    """Of all the campaign's steps."""
    prediction: Prediction
    measures: Measures
    """Of the simulated run's files, as the report takes them of the real run's."""

    def require(self, limits: PlanConfig) -> None:
        """Raises `PlanRefused` with a line for every limit that is not kept."""
        found = self.prediction
        problems = [
            f"plan.{option} ({limit:g}) is below the predicted {value:.4g} {unit}"
            for option, limit, value, unit in (
                ("max_step_seconds", limits.max_step_seconds, found.step_seconds, "s of a step"),
                ("max_usd", limits.max_usd, self.usd, f"USD of {self.campaign_steps} steps"),
                ("max_usd_per_hour", limits.max_usd_per_hour, found.usd_per_hour, "USD of an hour"),
            )
            if limit is not None and value > limit
        ]
        if problems:
            raise PlanRefused(
                f"the campaign is not started, by its plan on cluster {self.cluster}:\n"
                + "\n".join(f"  {problem}" for problem in problems)
                + "\nraise the limit, or change the campaign"
            )


def require_plan(campaign: Campaign, plan: PlanConfig) -> ClusterConfig:
    """The cluster of a plan that can be made; nothing is simulated. Raises `CampaignError`."""
    try:
        cluster = ClusterConfig.load(plan.cluster)
        fit(campaign, cluster)
    except ClusterError as error:
        raise CampaignError(f"plan.cluster: {error}") from None
    steps = campaign.train.steps
    if steps == 0 or (plan.warm_up_steps or 0) >= steps:
        raise CampaignError(
            f"plan.warm_up_steps ({plan.warm_up_steps or 0}) leaves nothing of train.steps ({steps}): "
            "lower it, or take plan away"
        )
    return cluster


def make_plan(campaign: Campaign, plan: PlanConfig) -> Plan:
    """Simulate the campaign, which takes seconds. Raises `CampaignError` where it cannot be simulated."""
    cluster = require_plan(campaign, plan)
    # Of a very short campaign at least its last step is left.
    usual = min(warm_up_steps(campaign), campaign.train.steps - 1)
    warm_up = usual if plan.warm_up_steps is None else plan.warm_up_steps
    steps = min(plan.steps, campaign.train.steps - warm_up)
    with TemporaryDirectory() as directory:
        folder = Path(directory) / "planned"
        prediction = predict(campaign, cluster, steps=steps, warm_up=warm_up, folder=folder)
        files = RunFiles(folder)
        measures = Measures.of(files.read_metrics(), files.read_spans(), warm_up)
    assert measures is not None  # the simulation ran these steps
    return Plan(
        cluster=cluster.name,
        warm_up_steps=warm_up,
        campaign_steps=campaign.train.steps,
        usd=campaign.train.steps * prediction.usd_per_step,
        prediction=prediction,
        measures=measures,
    )
