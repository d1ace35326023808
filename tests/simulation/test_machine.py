import asyncio
from pathlib import Path

import pytest

from infra.clock import now
from infra.performance.calibrated import Calibration
from infra.performance.host_costs import HostCosts
from infra.virtual_time import run_virtual
from tasks.simulation.cluster import ClusterConfig
from tasks.simulation.machine import ManyMachines, OneMachine, machines_of
from tasks.simulation.run import simulate
from tests.simulation.small import cluster_data, small_campaign

COSTS = HostCosts(
    cores=2,
    control_step_s=0.5,
    control_trajectory_s=0.2,
    proxy_turn_s=0.02,
    worker_turn_s=0.06,
    host_turn_s=0.01,
)


def test_a_turn_takes_its_way_through_proxy_worker_and_host() -> None:
    async def scenario() -> list[float]:
        machine = OneMachine(COSTS)
        await machine.trajectory_begins()
        begun = now()
        await machine.answer_arrives()
        arrived = now()
        await machine.observation_leaves()
        left = now()
        await machine.step_begins()
        return [begun, arrived - begun, left - arrived, now() - left]

    assert run_virtual(scenario()) == pytest.approx([0.1, 0.01 + 0.03 + 0.01, 0.03 + 0.01, 0.5])


def test_turns_of_many_wait_for_the_one_worker() -> None:
    async def turn(machine: OneMachine) -> None:
        await machine.answer_arrives()
        await machine.observation_leaves()

    async def scenario() -> float:
        machine = OneMachine(COSTS)
        await asyncio.gather(*(turn(machine) for _ in range(50)))
        return now()

    # 50 times the worker's 60 ms, and little besides: the others compute beside it.
    assert 3.0 < run_virtual(scenario()) < 3.2


def test_without_costs_nothing_takes_time() -> None:
    async def scenario() -> float:
        machines = machines_of(None)
        assert isinstance(machines, ManyMachines)
        await machines.trajectory_begins()
        await machines.answer_arrives()
        await machines.observation_leaves()
        await machines.trajectory_ends()
        await machines.step_begins()
        return now()

    assert run_virtual(scenario()) == 0


def simulated(folder: Path, cores: float) -> float:
    calibration = Calibration(
        name="here",
        fitted_on="nothing",
        hardware={},
        host=HostCosts(cores=cores, worker_turn_s=0.05, control_trajectory_s=0.05),
    )
    calibration.save(folder / "coefficients.json")
    cluster = cluster_data(coefficients=str(folder / "coefficients.json"))
    return simulate(small_campaign(mode="sync_plus", alpha=0), ClusterConfig.parse(cluster)).step_seconds


def test_a_calibration_of_one_machine_has_a_run_share_its_cores(tmp_path: Path) -> None:
    many, two, one = simulated(tmp_path, 16), simulated(tmp_path, 2), simulated(tmp_path, 1)
    assert many <= two < one
    assert simulated(tmp_path, 16) > 16 * 0.05  # the worker's and the control plane's own time
