"""Which pools there are, what is bound to them, and what serves in the place of a pool that is gone. Pure.

A *subject* is what gets a pool: a role of the run (`pools.train`) or a domain (`domain:swe`). It is bound at
deployment, and keeps its pool over a restart: bindings are plain data that the run's folder holds.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from infra.affinity import CLASS_PREFERENCES, Preference, WorkerClass
from infra.hardware import Hardware, HardwareKind

MEMORY_SHARE = 0.9
"""Of a device's memory that a model may fill: the rest is the runtime's, and fragmentation."""

ANYWHERE = "*"
"""Bound to this, a subject may be on any pool."""


class NoCompatiblePool(RuntimeError):
    """No available pool can take the subject. The message names the subject and why each pool cannot."""


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool of `capacity` equal devices; hardware None is one whose hardware nobody named."""

    name: str
    hardware: Hardware | None = None
    capacity: int = 1
    available: bool = True


@dataclass(frozen=True, slots=True)
class Binding:
    """What serves a subject. `pool` differs from `requested` after a fall-back, or a profile's advice."""

    subject: str
    requested: str
    pool: str
    reason: str = ""  # why it is not the requested one; empty where it is

    @property
    def moved(self) -> bool:
        return self.pool != self.requested

    def warning(self) -> str:
        """What a person should read where a subject is not where it was asked to be."""
        return f"{self.subject}: pool {self.pool!r} in the place of {self.requested!r}: {self.reason}"


@dataclass(slots=True)
class ResourceManager:
    """The pools of a run and its bindings. `bindings` are those of an earlier session of the run."""

    pools: dict[str, Pool]
    bindings: dict[str, Binding] = field(default_factory=dict)

    @classmethod
    def of(cls, pools: Iterable[Pool], bindings: Iterable[Binding] = ()) -> "ResourceManager":
        return cls({pool.name: pool for pool in pools}, {binding.subject: binding for binding in bindings})

    @property
    def available(self) -> list[str]:
        return [pool.name for pool in self.pools.values() if pool.available]

    def bind(self, subject: str, requested: str, memory_bytes: float = 0.0) -> Binding:
        """Bind a subject to the pool it asks for, or to a compatible one. Raises `NoCompatiblePool`.

        A subject bound before to an available pool keeps it, so long as it asks for the same. `memory_bytes`
        is what the subject's model takes, over all devices of the pool.
        """
        before = self.bindings.get(subject)
        if before is not None and before.requested == requested and self._is_available(before.pool):
            return before
        if self._is_available(requested):
            reason = ""
            pool = requested
        else:
            pool = self._fall_back(subject, requested, memory_bytes)
            reason = f"{requested!r} is not available"
        binding = Binding(subject, requested, pool, reason)
        self.bindings[subject] = binding
        return binding

    def move(self, subject: str, pool: str, reason: str) -> Binding:
        """Bind a subject to another pool than it asks for. It stays there when the run is resumed."""
        before = self.bindings[subject]
        if not self._is_available(pool):
            raise NoCompatiblePool(f"{subject} cannot move to {pool!r}: there is no such pool available")
        self.bindings[subject] = Binding(subject, before.requested, pool, reason)
        return self.bindings[subject]

    def keep_only(self, subjects: Iterable[str]) -> None:
        """Forget bindings of subjects that the campaign no longer has."""
        kept = set(subjects)
        self.bindings = {name: binding for name, binding in self.bindings.items() if name in kept}

    def fall_backs(self, name: str, memory_bytes: float = 0.0) -> list[str]:
        """The other pools that can stand in for this one, available or not, the best first.

        Compatible is a pool with memory enough for the model that is no step down: a GPU node can do a CPU's
        work, and a CPU must not take a GPU's unasked, which would run for days without an error. Those of the
        same kind come before others; among them, the nearest in the ratio of compute to bandwidth. Where the
        hardware of either is not known, nothing can be said: it is left out.
        """
        wanted = self.pools.get(name)
        if wanted is None or wanted.hardware is None:
            return []
        ranked = []
        for pool in self.pools.values():
            if pool.name == name or pool.hardware is None or _unfit(pool, wanted.hardware, memory_bytes):
                continue
            distance = abs(math.log(pool.hardware.ridge / wanted.hardware.ridge))
            ranked.append((pool.hardware.kind != wanted.hardware.kind, distance, pool.name))
        return [pool for *_, pool in sorted(ranked)]

    def _fall_back(self, subject: str, requested: str, memory_bytes: float) -> str:
        for name in self.fall_backs(requested, memory_bytes):
            if self.pools[name].available:
                return name
        wanted = self.pools.get(requested)
        if wanted is None or wanted.hardware is None:
            raise NoCompatiblePool(
                f"{subject}: pool {requested!r} is not available, and what could stand in for it cannot be "
                f"told without its hardware: name it under pools.hardware"
            )
        whys = [
            f"{pool.name!r} {_why_not(pool, wanted.hardware, memory_bytes)}"
            for pool in self.pools.values()
            if pool.name != requested
        ]
        raise NoCompatiblePool(
            f"{subject}: pool {requested!r} is not available, and no other can take its place"
            + (f" ({'; '.join(whys)})" if whys else ": the campaign names no other")
        )

    def _is_available(self, name: str) -> bool:
        return name == ANYWHERE or (name in self.pools and self.pools[name].available)


def preferred_pool(worker_class: WorkerClass, pools: Mapping[str, Hardware]) -> str | None:
    """The pool that a worker class gets where nothing else is said; None where there is no pool at all.

    Of equal ones, the first by name. After RollArt: training on the compute GPU, rollout on the bandwidth
    GPU, environments on CPUs, rewards on a function service, else on a GPU.
    """
    if not pools:
        return None
    preference = CLASS_PREFERENCES[worker_class]
    return min(pools, key=lambda name: (*_rank(preference, pools[name]), name))


def _rank(preference: Preference, entry: Hardware) -> tuple[int, float]:
    order: dict[Preference, tuple[HardwareKind, ...]] = {
        "compute": ("gpu", "cpu", "serverless"),
        "bandwidth": ("gpu", "cpu", "serverless"),
        "cpu": ("cpu", "gpu", "serverless"),
        "reward": ("serverless", "gpu", "cpu"),
    }
    kind = order[preference].index(entry.kind)
    # A reward model is small: the cheapest device will do. Environments take what is cheapest as well.
    within = {"compute": -entry.ridge, "bandwidth": entry.ridge, "cpu": entry.cost, "reward": entry.cost}
    return kind, within[preference]


def _unfit(pool: Pool, wanted: Hardware, memory_bytes: float) -> str:
    """Why this pool can never stand in for hardware like `wanted`; empty where it can."""
    if pool.hardware is None:
        return "has no hardware named"
    if pool.hardware.kind == "serverless" and wanted.kind != "serverless":
        return "is a function service"
    if pool.hardware.kind == "cpu" and wanted.kind == "gpu":
        return "has CPUs only"
    room = MEMORY_SHARE * pool.hardware.memory_bytes * pool.capacity
    if memory_bytes > room:
        return f"has {room / 1e9:.1f} GB for a model of {memory_bytes / 1e9:.1f} GB"
    return ""


def _why_not(pool: Pool, wanted: Hardware, memory_bytes: float) -> str:
    return _unfit(pool, wanted, memory_bytes) or "is not available either"


def bindings_to_json(bindings: Iterable[Binding]) -> list[dict[str, Any]]:
    return [
        {"subject": b.subject, "requested": b.requested, "pool": b.pool, "reason": b.reason} for b in bindings
    ]


def bindings_from_json(data: Iterable[Mapping[str, Any]]) -> list[Binding]:
    return [Binding(**entry) for entry in data]
