"""A what-if: what is asked of a campaign on a cluster, and each candidate made of the two files."""

from collections.abc import Iterable
from typing import Any

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from infra.config import Config
from tasks.campaign import Campaign, CampaignError
from tasks.simulation.cluster import ClusterConfig, ClusterError
from tasks.simulation.fitting import fit
from tasks.simulation.what_if.candidates import Axis, Point, Space, VaryError, changed
from tasks.simulation.what_if.predict import STEPS
from tasks.simulation.what_if.prediction import Objective
from tasks.simulation.what_if.search import Limits, Search


class WhatIf(Config):
    """The question. Without `vary`, what the campaign does on the cluster as the files say."""

    vary: tuple[str, ...] = ()
    """`option=value,value` each: a campaign's option, or one of the cluster file with `cluster.` before it.
    Options tied with `+` take the same value."""
    usd_per_hour: PositiveFloat | None = None
    """Budget for the rent of the whole cluster."""
    usd_per_step: PositiveFloat | None = None
    """Budget for a step."""
    step_seconds: PositiveFloat | None = None
    """A step may not take longer."""
    objective: Objective = Objective.STEP_TIME
    """`step-time` compares cost and seconds of a step; `throughput` cost and speed of a token, for candidates
    whose batches differ."""
    most: PositiveInt = 64
    """Candidates simulated at most. Of more, a random part, and then what is beside the best."""
    steps: PositiveInt = STEPS
    """Train steps simulated of each candidate."""
    warm_up_steps: NonNegativeInt | None = None
    """Steps before these that are left out of the means. Empty: train.alpha + 1 where rollout overlaps
    training, else 1."""
    seed: NonNegativeInt = 0
    """Of the random part of a large search."""

    @field_validator("vary")
    @classmethod
    def _axes_can_be(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        Space.of([Axis.parse(axis) for axis in value])
        return value

    @property
    def space(self) -> Space:
        return Space.of([Axis.parse(axis) for axis in self.vary])

    @property
    def limits(self) -> Limits:
        return Limits(self.usd_per_hour, self.usd_per_step, self.step_seconds)


class NoCandidate(ClusterError):
    """No candidate can run. The message has a line for each reason."""

    @classmethod
    def of(cls, problems: Iterable[str]) -> "NoCandidate":
        lines = "\n".join(f"  {problem}" for problem in dict.fromkeys(problems))
        return cls(f"no candidate can run:\n{lines}")


class Question:
    """Candidates of two files. What is the same in all of them is read once."""

    def __init__(self, campaign: Campaign, cluster: ClusterConfig, what_if: WhatIf):
        self.what_if, self.space = what_if, what_if.space
        self._campaign: dict[str, Any] = campaign.model_dump(mode="json")
        self._cluster: dict[str, Any] = cluster.model_dump(mode="json")

    def search(self) -> Search:
        """Raises `VaryError` for an option that no candidate can have."""
        asked = self.what_if
        if self.space.axes:
            changed(self._campaign, self._cluster, self.space.changes(self.space.at(0)))
        return Search(
            self.space,
            self.problem,
            limits=asked.limits,
            objective=asked.objective,
            most=asked.most,
            seed=asked.seed,
        )

    def require(self) -> None:
        """Raises `VaryError` for an option that no candidate can have, `NoCandidate` where none can run or be
        paid. In a space that is too large to look at all of it, the latter is found only on the way."""
        search = self.search()
        if search.exhaustive:
            problems = [self.problem(point) for point in self.space.points()]
            if all(problems):
                raise NoCandidate.of(problem for problem in problems if problem)

    def candidate(self, point: Point) -> tuple[Campaign, ClusterConfig]:
        """Raises `CampaignError`, `ClusterError` or `VaryError` for one that cannot run."""
        campaign, cluster = changed(self._campaign, self._cluster, self.space.changes(point))
        return Campaign.parse(campaign), ClusterConfig.parse(cluster)

    def problem(self, point: Point) -> str | None:
        """Why the candidate is turned down before anything is simulated."""
        try:
            campaign, cluster = self.candidate(point)
            rent = self.what_if.limits.rent_problem(cluster.usd_per_hour)
            if rent is None:
                fit(campaign, cluster)
        except (CampaignError, ClusterError, VaryError) as error:
            return reason(error)
        return rent


def reason(error: Exception) -> str:
    """An error's lines as one, without its heading."""
    heading, *lines = str(error).splitlines()
    return "; ".join(line.strip() for line in lines) or heading
