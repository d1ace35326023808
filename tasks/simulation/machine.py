"""One machine that carries a whole run: engines, trainer, control plane, proxy and environments share it."""

from infra.clock import LOOP_CLOCK, Clock
from infra.performance.host_costs import HostCosts
from tasks.simulation.cores import ProcessClock, SharedCores


class OneMachine:
    """The processes of a run on shared cores, each with its own clock. To be made on the running loop."""

    def __init__(self, costs: HostCosts):
        self._costs = costs
        self._cores = SharedCores(costs.cores, costs.pace_when_full)
        self._control = self._cores.process()
        self._proxy = self._cores.process()
        self._worker = self._cores.process()
        self._host = self._cores.process()
        self.trainer_clock: Clock = self._cores.process()

    def engine_clock(self) -> ProcessClock:
        """Of one more engine."""
        return self._cores.process()

    async def step_begins(self) -> None:
        """The control plane commits a batch and turns to its training."""
        await self._control.work(self._costs.control_step_s)

    async def trajectory_begins(self) -> None:
        await self._control.work(self._costs.control_trajectory_s / 2)

    async def trajectory_ends(self) -> None:
        await self._control.work(self._costs.control_trajectory_s / 2)

    async def answer_arrives(self) -> None:
        """A response reaches the environment, through proxy and worker; or a reset is asked for."""
        await self._proxy.work(self._costs.proxy_turn_s / 2)
        await self._worker.work(self._costs.worker_turn_s / 2)
        await self._host.work(self._costs.host_turn_s)

    async def observation_leaves(self) -> None:
        """What the environment said goes to the engine, through worker and proxy."""
        await self._worker.work(self._costs.worker_turn_s / 2)
        await self._proxy.work(self._costs.proxy_turn_s / 2)


class ManyMachines:
    """Nothing shares its cores with anything, and what is around engines and trainer costs no time."""

    trainer_clock: Clock = LOOP_CLOCK

    def engine_clock(self) -> Clock:
        return LOOP_CLOCK

    async def step_begins(self) -> None: ...

    async def trajectory_begins(self) -> None: ...

    async def trajectory_ends(self) -> None: ...

    async def answer_arrives(self) -> None: ...

    async def observation_leaves(self) -> None: ...


Machines = OneMachine | ManyMachines


def machines_of(costs: HostCosts | None) -> Machines:
    """By what a calibration says of the host. To be called on the running loop."""
    return ManyMachines() if costs is None else OneMachine(costs)
