"""Episodes for agents that run elsewhere: a foreign process takes one, plays it, and hands in its result."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tasks.environment.hosts import EnvironmentRaised, EnvironmentTimeout
from tasks.environment.sources.base import StepResult


@dataclass(eq=False, slots=True)
class Offer:
    domain: str
    task: str  # JSON
    access: dict[str, Any]
    taken: asyncio.Event
    result: "asyncio.Future[StepResult]"


class Offers:
    """The oldest episode is taken first. An offer ends with its episode, taken or not."""

    def __init__(self) -> None:
        self._waiting: list[Offer] = []
        self._taken: dict[str, Offer] = {}  # by API key
        self._takers: list[tuple[Callable[[Offer], bool], asyncio.Future[Offer]]] = []

    async def offer(self, domain: str, task: str, access: dict[str, Any], limit_s: float) -> StepResult:
        """Wait for a taker, then for its result.

        Raises `EnvironmentTimeout` `limit_s` after it was taken, and `EnvironmentRaised` with the error that
        the agent hands in.
        """
        future: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        offer = Offer(domain, task, access, asyncio.Event(), future)
        self._waiting.append(offer)
        self._match()
        try:
            await offer.taken.wait()
            async with asyncio.timeout(limit_s):
                return await future
        except TimeoutError:
            raise EnvironmentTimeout(
                f"no result of the agent within {limit_s:g} s: see domains.{domain}.options.timeout_s"
            ) from None
        finally:
            if offer in self._waiting:
                self._waiting.remove(offer)
            self._taken.pop(access["api_key"], None)

    async def take(self, domain: str | None, wait_s: float) -> Offer | None:
        """An episode of `domain`, of any where it is None; None when there is none within `wait_s`."""
        future: asyncio.Future[Offer] = asyncio.get_running_loop().create_future()
        taker = (lambda offer: domain in (None, offer.domain), future)
        self._takers.append(taker)
        self._match()
        try:
            async with asyncio.timeout(wait_s):
                return await future
        except TimeoutError:
            return None
        finally:
            if taker in self._takers:
                self._takers.remove(taker)

    def end(self, api_key: str, result: StepResult | str) -> bool:
        """The agent's result, or its error as text. False where no such episode is being played."""
        offer = self._taken.get(api_key)
        if offer is None or offer.result.done():
            return False
        if isinstance(result, str):
            offer.result.set_exception(EnvironmentRaised(result))
        else:
            offer.result.set_result(result)
        return True

    def _match(self) -> None:
        for taker in list(self._takers):
            wants, future = taker
            offer = next((offer for offer in self._waiting if wants(offer)), None)
            if offer is None or future.done():
                continue
            self._waiting.remove(offer)
            self._takers.remove(taker)
            self._taken[offer.access["api_key"]] = offer
            offer.taken.set()
            future.set_result(offer)
