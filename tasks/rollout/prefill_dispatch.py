"""Carries out the prefill plan: has a prefill worker compute a turn's KV, and says where to fetch it."""

import logging
from collections.abc import Iterable
from typing import Any

from infra.rpc import ConnectionLost, RpcClient, RpcError
from tasks.rollout.prefill import PrefillPlan
from tasks.rollout.routing import Router
from tasks.rollout.workers import Workers

logger = logging.getLogger(__name__)

_ITEM_BYTES = 4  # of a token on the wire

Kv = dict[str, Any]
"""What a decoding engine's `generate` is told to fetch; empty where it computes everything itself."""


class PrefillDispatch:
    """A prefill that fails in whatever way costs time only: the worker that decodes then does it."""

    def __init__(self, router: Router, workers: Workers, plan: PrefillPlan, limit_s: float):
        """A prefill that takes over `limit_s` has failed."""
        self._router = router
        self._workers = workers
        self._plan = plan
        self._limit_s = limit_s
        self.prefilled_turns = 0
        """Turns whose context a prefill worker computed."""

    async def prefill(self, trajectory: str, tokens: bytes, domain: str, version: int) -> Kv:
        """Fields for `generate`: `kv`, or none. `version` is the one that is served."""
        decoder = self._plan.decoder(trajectory)
        if isinstance(decoder, RpcClient) and not decoder.connected:
            self._plan.lost(trajectory)
        if not self._plan.is_worthwhile(trajectory, len(tokens) // _ITEM_BYTES, version):
            return {}
        name = self._router.route_prefill(domain, self._plan.prefiller(trajectory))
        if name is None:
            return {}
        try:
            return await self._prefill_on(name, trajectory, tokens)
        finally:
            self._router.prefilled(name)

    def decoded(self, trajectory: str, decoder: RpcClient, tokens: int, version: int) -> None:
        """A turn ended on this worker with a context of so many tokens."""
        self._plan.decoded(trajectory, decoder, tokens, version)

    def finish(self, trajectories: Iterable[str]) -> dict[str, list[str]]:
        """These trajectories are over. Returns, by prefill worker, those whose KV it may forget."""
        return self._plan.finish(trajectories)

    async def _prefill_on(self, name: str, trajectory: str, tokens: bytes) -> Kv:
        client: RpcClient | None = None
        try:
            client = self._workers.client(name)
            held = await client.call("prefill", {"session": trajectory, "tokens": tokens}, self._limit_s)
        except ConnectionLost as error:
            self._workers.lost(name, str(error), client)
            return {}
        except (RpcError, TimeoutError) as error:
            logger.warning("%s could not prefill %s: %s: %s", name, trajectory, type(error).__name__, error)
            if _is_the_workers_fault(error) and self._router.failed(name):
                self._workers.lost(name, f"prefills failed repeatedly, the last one with {error}", client)
            return {}
        self._router.succeeded(name)
        self._plan.prefilled(trajectory, name)
        self.prefilled_turns += 1
        address = self._workers.address(name)
        return {"kv": {"url": address.url, "token": address.token, "key": held["key"]}}


def _is_the_workers_fault(error: RpcError | TimeoutError) -> bool:
    return not isinstance(error, RpcError) or error.code in ("engine_failed", "internal")
