"""What runs on the function service: one activation judges many rewards, in killable processes of its own.

`serve` is the function that Lithops calls. It takes bytes and gives nothing back: what it has to say are
reports in Lithops' storage (`tasks.reward.mailbox`), so that the dispatcher parses data and unpickles none.
"""

import asyncio
import os
from dataclasses import asdict, dataclass
from typing import Any

import msgpack

from infra.child_pool import ChildPool
from infra.children import ChildDied, ChildError
from infra.clock import now
from tasks.reward.mailbox import STOP, Report, Work, inbox, outbox, pack_report, put, unpack_order
from tasks.trajectory import InfraError, outcome_to_json


@dataclass(frozen=True, slots=True)
class ActivationOrder:
    """All that an activation is told when it starts."""

    root: str  # of the dispatcher's mail in Lithops' storage
    name: str
    functions: list[str]  # imported before the activation reports, so that no reward's limit pays for it
    work: bytes  # a packed order
    processes: int
    memory_mb: int | None  # address space of one process
    idle_s: float
    life_s: float
    poll_s: float
    alive_s: float  # longest silence

    def pack(self) -> bytes:
        data: bytes = msgpack.packb(asdict(self), use_bin_type=True)
        return data

    @classmethod
    def unpack(cls, data: bytes) -> "ActivationOrder":
        return cls(**msgpack.unpackb(data, raw=False))


def serve(order: bytes, storage: Any) -> None:
    """Judge until there is nothing left to do. Lithops passes its `storage` to a parameter of this name."""
    os.environ.pop("LITHOPS_CONFIG", None)  # it can hold credentials, and the children meet untrusted text
    asyncio.run(_Activation(ActivationOrder.unpack(order), storage).run())


class _Activation:
    def __init__(self, order: ActivationOrder, storage: Any):
        self._order = order
        self._storage = storage
        limits = {} if order.memory_mb is None else {"AS": order.memory_mb << 20}
        self._pool = ChildPool(
            "tasks.reward.worker", {"functions": order.functions}, order.processes, limits=limits
        )
        self._judging: set[asyncio.Task[None]] = set()
        self._results: list[tuple[str, list[Any]]] = []
        self._news = asyncio.Event()
        self._reports = 0
        self._open = 0  # rewards taken and not judged
        self._busy_since = 0.0
        self._busy_s = 0.0
        self._idle_since = 0.0
        self._stopped = False  # by the dispatcher
        self._finished = False

    async def run(self) -> None:
        began = now()
        try:
            await self._pool.start()
        except ChildDied as error:
            await self._report(Report("failed", text=str(error)))
            return
        try:
            await self._report(Report("started", seconds=now() - began))
            self._idle_since = now()
            self._take(unpack_order(self._order.work) or [])
            async with asyncio.TaskGroup() as group:
                group.create_task(self._speak())
                while not self._over(began):
                    await asyncio.sleep(self._order.poll_s)
                    if self._order.idle_s > 0:
                        await self._look()
                self._finished = True
                self._news.set()
            await self._report(Report("ended", seconds=now() - began))
        finally:
            await self._pool.close()

    def _over(self, began: float) -> bool:
        if self._stopped:
            return True
        if self._open:
            return False
        return now() - self._idle_since >= self._order.idle_s or now() - began >= self._order.life_s

    async def _look(self) -> None:
        """Take what has come."""
        folder = inbox(self._order.root, self._order.name)
        for key in sorted(await self._call("list_keys", folder)):
            if key.endswith(f"/{STOP}"):
                self._stopped = True
                return
            work = unpack_order(await self._call("get_object", key))
            if work is not None:
                await self._call("delete_object", key)
                self._take(work)

    def _take(self, work: list[Work]) -> None:
        if work and not self._open:
            self._busy_since = now()
        self._open += len(work)
        for item in work:
            task = asyncio.get_running_loop().create_task(self._judge(item))
            self._judging.add(task)
            task.add_done_callback(self._judging.discard)

    async def _judge(self, work: Work) -> None:
        try:
            outcome = await self._pool.call("score", [work.function, work.fields], work.limit_s)
        except ChildError as error:
            limit = "the shorter of the domain's reward_limit_s and limit_s of @serverless"
            reason = f"reward {work.function}: {type(error).__name__}: {error} ({limit})"
            outcome = outcome_to_json(InfraError(reason))
        self._results.append((work.key, outcome))
        self._idle_since = now()
        self._open -= 1
        if not self._open:
            self._busy_s += self._idle_since - self._busy_since
        self._news.set()

    async def _speak(self) -> None:
        """Tell results as they come, those of one moment together, so that none waits for a hanging one."""
        while not self._finished:
            try:
                async with asyncio.timeout(self._order.alive_s):
                    await self._news.wait()
            except TimeoutError:
                await self._report(Report("alive"))
            await self._tell()

    async def _tell(self) -> None:
        self._news.clear()
        results, self._results = self._results, []
        busy_s, self._busy_s = self._busy_s, 0.0
        if results:
            await self._report(Report("results", results, busy_s))

    async def _report(self, report: Report) -> None:
        key = f"{outbox(self._order.root, self._order.name)}{self._reports:08d}"
        self._reports += 1
        await asyncio.to_thread(put, self._storage, key, pack_report(report))

    async def _call(self, method: str, *arguments: Any) -> Any:
        return await asyncio.to_thread(getattr(self._storage, method), self._storage.bucket, *arguments)
