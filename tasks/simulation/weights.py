"""The publication of weights in a simulation: how long pushes, pulls and putting them in place take.

What overlaps with what is the control plane's doing: the session pushes in the background, the proxy has the
engines pull beside generation, and an update waits for what has not come by then.
"""

import asyncio

from infra.model_size import ModelSize
from infra.performance.transfer import Transport, transport
from tasks.simulation.cluster import WeightsSpec


def transport_of(spec: WeightsSpec) -> Transport:
    """The catalogue's transport with what the cluster file replaces of it."""
    chosen = transport(spec.transport)
    return transport(
        spec.transport,
        push_gb_s=spec.push_gb_s,
        pull_gb_s=spec.pull_gb_s,
        push_latency_s=spec.latency_s if chosen.push_gb_s else None,
        pull_latency_s=spec.latency_s,
    )


class SimulatedWeights:
    """The versions that are published, and the ways to and from the store.

    `direct` transports have no store: the trainer pushes nothing, and engines get a version while they stand
    still for it.
    """

    def __init__(self, size: ModelSize, spec: WeightsSpec, engines: int):
        """`engines` pull at the same time."""
        self.transport = transport_of(spec)
        self.size = size.weight_bytes
        self._engines = engines
        self._load_bytes_s = spec.device_gb_s * 1e9
        self._published: set[int] = {0}
        self.pushes = 0
        self.pulls = 0

    @property
    def direct(self) -> bool:
        return not self.transport.push_gb_s

    def load_seconds(self, devices: int) -> float:
        """From host memory into an engine of so many devices, each its share. Direct transports end there."""
        return 0.0 if self.direct else self.size / devices / self._load_bytes_s

    async def push(self, version: int) -> None:
        """Publish: until the store has the weights of this version."""
        await asyncio.sleep(self.transport.push_seconds(self.size))
        self.pushes += 1
        self._published.add(version)

    async def pull(self, version: int) -> None:
        """Until one engine has the weights of this version. Raises LookupError for one not published."""
        if version not in self._published:
            raise LookupError(f"version {version} is not published")
        await asyncio.sleep(self.transport.pull_seconds(self.size, self._engines))
        self.pulls += 1
