"""An inference engine without a model: the batching of the embedded engine, with injected durations.

What an iteration takes is slept on the event loop, so a few of these show on one machine, or on a
virtual-time event loop, what a fleet of real ones would do. Tokens come from the requests' seeds.
"""

import asyncio
import itertools
import math
from collections.abc import Callable, Collection

import numpy as np
from numpy.typing import NDArray

from infra.clock import now
from tasks.rollout.config import SimulatedEngineConfig
from tasks.rollout.engines.batch_schedule import BatchSchedule
from tasks.rollout.engines.batching import BatchingEngine
from tasks.rollout.engines.requests import Finished, Iteration
from tasks.rollout.engines.sampling import draws

_GATHER_S = 0.001


class SimulatedPolicy:
    """Ends a turn with a probability that depends on the tokens sampled so far, and otherwise samples any
    other token with equal probability. It is the same at every temperature and policy version."""

    def __init__(
        self, settings: SimulatedEngineConfig, vocabulary: int, stop_tokens: Collection[int], longest: int
    ):
        """Raises ValueError where no token is left beside the stop tokens."""
        self._end = min(stop_tokens)
        self._others = np.setdiff1d(np.arange(vocabulary, dtype=np.int32), list(stop_tokens))
        if not len(self._others):
            raise ValueError(f"a vocabulary of {vocabulary} has stop tokens only")
        self._end_probability = end_probabilities(settings, longest)

    def sample(
        self, uniform: NDArray[np.float64], indices: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Tokens and log-probabilities; row r is token `indices[r]` of its turn, drawn at `uniform[r]`."""
        ends_with = self._end_probability[indices]
        ended = uniform < ends_with
        goes_on = np.where(ended, 1.0, 1.0 - ends_with)
        place = ((uniform - ends_with) / goes_on * len(self._others)).astype(np.int64)
        tokens = np.where(ended, self._end, self._others[place.clip(0, len(self._others) - 1)])
        logprobs = np.log(np.where(ended, ends_with, goes_on / len(self._others)))
        return tokens.astype(np.int32), logprobs.astype(np.float32)


def end_probabilities(settings: SimulatedEngineConfig, longest: int) -> NDArray[np.float64]:
    """Of each of `longest` tokens of a turn: that it is the end token, given that none before it was.

    With `median_tokens` the length of a turn, end token included, is a log-normal one rounded up: the hazard
    P(L = k) / P(L >= k) of that distribution.
    """
    if settings.median_tokens is None:
        return np.full(longest, settings.end_probability)
    scale = settings.tokens_sigma * math.sqrt(2)
    beyond = [1.0] + [
        0.5 * math.erfc(math.log(length / settings.median_tokens) / scale) for length in range(1, longest + 1)
    ]
    return np.array(
        [1.0 - after / before if before > 0 else 1.0 for before, after in itertools.pairwise(beyond)]
    )


class SimulatedEngine(BatchingEngine[None]):
    """By a `SimulatedPolicy`. An iteration takes `prefill_s_per_token` for each token of context computed,
    `decode_s`, and `decode_s_per_sequence` for each row that samples."""

    def __init__(
        self,
        *,
        settings: SimulatedEngineConfig,
        vocabulary: int,
        stop_tokens: Collection[int],
        max_context: int,
        require_published: Callable[[int], object],
        version: int = 0,
    ):
        """`require_published` raises where the version it is given is not in the weight store."""
        slots = settings.max_sessions
        schedule = BatchSchedule(
            slots=slots,
            max_running=settings.max_running,
            max_batch_tokens=settings.max_batch_tokens,
            max_context=max_context,
            stop_tokens=stop_tokens,
        )
        super().__init__(schedule, vocabulary=vocabulary, version=version)
        self._settings = settings
        self._policy = SimulatedPolicy(settings, vocabulary, stop_tokens, max_context)
        self._draws = np.zeros((slots, max_context))
        self._sampled_before = np.zeros(slots, np.int64)
        self._require_published = require_published
        self._between_iterations = asyncio.Event()
        self._between_iterations.set()

    async def suspend(self) -> None:
        """Returns once the iteration under way is over."""
        await super().suspend()
        await self._between_iterations.wait()

    async def _pull(self, version: int) -> None:
        self._require_published(version)
        await asyncio.sleep(self._settings.pull_s)

    async def _put_in_place(self, weights: None) -> None:
        await asyncio.sleep(self._settings.update_s)

    async def _iterate_for_ever(self) -> None:
        while True:
            began = now()
            while self._schedule.has_work():
                began = await self._iterate(began)
            self._wake.clear()
            await self._wake.wait()
            # Requests that are sent together run together: their messages take a few passes to be read.
            await asyncio.sleep(_GATHER_S)

    async def _iterate(self, began: float) -> float:
        """One iteration from `began`, the end of the one before or the arrival of work; returns its end.

        Sleeping until the end, and not for the duration, keeps a timer's rounding from adding up.
        """
        iteration = self._schedule.plan()
        assert iteration is not None
        ends = began + self._duration(iteration)
        finished = self._sampled(iteration)
        self._between_iterations.clear()
        try:
            await asyncio.sleep(max(0.0, ends - now()))
        finally:
            self._between_iterations.set()
        self._steps += 1
        self._busy_seconds += ends - began
        self._settle(finished)
        return ends

    def _sampled(self, iteration: Iteration) -> list[Finished]:
        """What the iteration samples. The schedule learns of it at once, since it hears no event between an
        iteration and its completion; callers are answered when the iteration's time is over."""
        for request in iteration.started:
            first, count = request.sampled_before, request.max_new_tokens
            self._draws[request.slot, :count] = draws(request.seed, first + count)[first:]
            self._sampled_before[request.slot] = first
        slots, index = iteration.slots[iteration.sampled], iteration.sample_index
        tokens, logprobs = self._policy.sample(self._draws[slots, index], self._sampled_before[slots] + index)
        return self._schedule.complete(iteration, tokens, logprobs, self._version)

    def _duration(self, iteration: Iteration) -> float:
        settings = self._settings
        sampled = len(iteration.sample_index)
        decoded = int(((iteration.sample_index > 0) & (iteration.counts[iteration.sampled] == 1)).sum())
        prefilled = int(iteration.counts.sum()) - decoded
        return (
            settings.decode_s
            + settings.decode_s_per_sequence * sampled
            + settings.prefill_s_per_token * prefilled
        )
