"""What a campaign says of its plan: the simulation of itself before it starts."""

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from infra.config import Config


class PlanConfig(Config):
    """Simulate the campaign on a cluster file before anything is started. The prediction is kept in the run's
    `plan.json` and the report sets it beside what was measured."""

    cluster: str
    """The cluster file, as `python -m flows.simulate` takes it."""
    steps: PositiveInt = 5
    """Train steps that are simulated, at most the campaign's own; the warm-up comes before them."""
    warm_up_steps: NonNegativeInt | None = None
    """First steps that are left out of the means, of the run's as well. Empty: train.alpha + 1 where rollout
    overlaps training, else 1."""
    max_step_seconds: PositiveFloat | None = None
    """Refuse to start where a step is predicted to take longer."""
    max_usd: PositiveFloat | None = None
    """Refuse to start where the campaign's steps together are predicted to cost more."""
    max_usd_per_hour: PositiveFloat | None = None
    """Refuse to start where the cluster's rent is higher."""
