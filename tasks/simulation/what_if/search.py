"""Which candidates to simulate, one after the other: Pareto local search over a space of options. Pure.

Those whose configuration cannot run, or whose rent is over the budget, are turned down before anything is
simulated. Of a space that is small enough every candidate is simulated. Of a larger one first a random part,
drawn without replacement by seed (Bergstra and Bengio 2012: where few options matter, random points cover
these better than a coarse grid), then the neighbours of every point of the Pareto front, until the front has
none left that was not tried (Paquete, Chiarandini and Stützle 2004) or the number of simulations is used up.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from tasks.simulation.what_if.candidates import Point, Space
from tasks.simulation.what_if.pareto import front
from tasks.simulation.what_if.prediction import Objective, Prediction

Admit = Callable[[Point], str | None]
"""Why a candidate cannot be taken, found without simulating it; None where it can."""

RANDOM_SHARE = 0.5
"""Of the simulations that a large space may take, those spent on the random part."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What an answer has to keep; None bounds nothing. Rent is known before, the others by simulating."""

    usd_per_hour: float | None = None
    usd_per_step: float | None = None
    step_seconds: float | None = None

    def rent_problem(self, usd_per_hour: float) -> str | None:
        if self.usd_per_hour is not None and usd_per_hour > self.usd_per_hour:
            return f"its rent of {usd_per_hour:.2f} USD an hour is over the budget of {self.usd_per_hour:g}"
        return None

    def problem(self, prediction: Prediction) -> str | None:
        """Which limit is not kept, with the numbers; None where all are."""
        rent = self.rent_problem(prediction.usd_per_hour)
        if rent is not None:
            return rent
        if self.usd_per_step is not None and prediction.usd_per_step > self.usd_per_step:
            return f"a step costs {prediction.usd_per_step:.3g} USD, over the limit of {self.usd_per_step:g}"
        if self.step_seconds is not None and prediction.step_seconds > self.step_seconds:
            return f"a step takes {prediction.step_seconds:.3g} s, over the limit of {self.step_seconds:g}"
        return None


class Search:
    """Says what to simulate next, and hears what came of it.

    `most` bounds the candidates simulated. With `ask` and `tell` the caller simulates as many at a time as
    it can; the outcome depends on how many of them are told between two calls of `ask`, so a driver that
    wants the same answer every time tells all that it asked for.
    """

    def __init__(
        self,
        space: Space,
        admit: Admit,
        *,
        limits: Limits | None = None,
        objective: Objective = Objective.STEP_TIME,
        most: int = 64,
        seed: int = 0,
    ):
        if most < 1:
            raise ValueError(f"a search simulates at least one candidate, not {most}")
        self.space, self.objective, self.limits, self.most = space, objective, limits or Limits(), most
        self._admit = admit
        self._asked: set[Point] = set()
        self._verdicts: dict[Point, str | None] = {}
        self.rejected: dict[Point, str] = {}
        """Turned down before or after simulation, each with its reason; those over a limit are in
        `predictions` too."""
        self.predictions: dict[Point, Prediction] = {}
        self._random = Random(seed)
        self._started = False

    @property
    def exhaustive(self) -> bool:
        """Whether every candidate is looked at."""
        return self.space.size <= self.most

    def ask(self) -> list[Point]:
        """Candidates to simulate next; none when the search is over. Raises RuntimeError before all that was
        asked for is told."""
        untold = self._asked - self.predictions.keys() - self.rejected.keys()
        if untold:
            raise RuntimeError(f"{len(untold)} candidates were asked for and not told")
        if not self._started:
            self._started = True
            return self._take(self._first())
        if self.exhaustive:
            return []
        # Where nothing keeps the limits yet, what comes nearest to them may be beside the best of the rest.
        centres = self.front() or front(
            {point: self.objective.costs(prediction) for point, prediction in self.predictions.items()}
        )
        return self._take([place for point in centres for place in self.space.neighbours(point)])

    def tell(self, point: Point, outcome: Prediction | str) -> None:
        """What the candidate is predicted to do, or why it could not be simulated."""
        if isinstance(outcome, str):
            self.rejected[point] = outcome
            return
        self.predictions[point] = outcome
        problem = self.limits.problem(outcome)
        if problem is not None:
            self.rejected[point] = problem

    def front(self) -> list[Point]:
        """Candidates within the limits that none beats in both cost and speed, the cheapest first."""
        return front(self._costs())

    def best(self) -> Point | None:
        """The fastest within the limits, the cheaper of equals; None where none keeps them."""
        costs = self._costs()
        return min(costs, key=lambda point: costs[point][::-1], default=None)

    def _costs(self) -> Mapping[Point, tuple[float, float]]:
        return {
            point: self.objective.costs(prediction)
            for point, prediction in self.predictions.items()
            if point not in self.rejected
        }

    def _first(self) -> list[Point]:
        if self.exhaustive:
            return list(self.space.points())
        wanted = max(1, round(self.most * RANDOM_SHARE))
        # Many may be turned down: more are drawn than wanted, and the rest of them is never asked for.
        drawn = self._random.sample(range(self.space.size), min(self.space.size, 50 * wanted))
        admitted: list[Point] = []
        for place in drawn:
            if len(admitted) == wanted:
                break
            if self._admitted(point := self.space.at(place)):
                admitted.append(point)
        return admitted

    def _take(self, points: list[Point]) -> list[Point]:
        left = self.most - len(self._asked)
        taken: list[Point] = []
        for point in dict.fromkeys(points):
            if len(taken) == left:
                break
            if point not in self._asked and self._admitted(point):
                taken.append(point)
        self._asked.update(taken)
        return taken

    def _admitted(self, point: Point) -> bool:
        if point not in self._verdicts:
            self._verdicts[point] = self._admit(point)
        problem = self._verdicts[point]
        if problem is not None:
            self.rejected[point] = problem
        return problem is None
