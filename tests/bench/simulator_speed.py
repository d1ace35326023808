"""How long RLSim takes for a step of the production workload on 3,000 GPUs, and how that grows.

`python -m tests.bench.simulator_speed [--smallest]` prints the points and the row, and writes the points to
runs/simulator_speed.json. Every point is a process of its own. What counts is the time of a core: on a
machine that has one to spare it is the time by the clock, which is given too.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from tasks.simulation.rollart.production import production_campaign, production_cluster
from tasks.simulation.run import simulate
from tasks.simulation.speed_figure import SpeedPoint, write_points
from tests.bench.rows import Row, at_most, table

POINTS = Path("runs/simulator_speed.json")
STEPS = 2
"""Of a simulation, so that an update comes while trajectories are in flight; time is given a step."""
PARTS = (8, 4, 2, 1)
"""The production batch and cluster are divided by these."""
LIMIT_S = 60.0


def measure(batch_part: int, cluster_part: int, steps: int = STEPS) -> SpeedPoint:
    """Simulate in this process a part of the production batch on a part of its GPUs."""
    campaign = production_campaign(batch_part, steps=steps)
    cluster = production_cluster(cluster_part)
    cpu, wall = time.process_time(), time.perf_counter()
    result = simulate(campaign, cluster, warm_up_steps=0)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return SpeedPoint(
        gpus=sum(cluster.devices_used.values()),
        trajectories=campaign.train.groups * campaign.train.group_size,
        steps=steps,
        turns=round(sum(row["rollout/turns"] for row in result.rows) / steps),
        cpu_seconds=cpu / steps,
        wall_seconds=wall / steps,
        virtual_seconds=result.step_seconds,
        events=result.events // steps,
        memory_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


def in_own_process(batch_part: int, cluster_part: int) -> SpeedPoint:
    """So that neither warm imports nor a heap that others filled count."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.bench.simulator_speed", "--point", str(batch_part), str(cluster_part)],
        check=True,
        capture_output=True,
        text=True,
    )
    return SpeedPoint(**json.loads(run.stdout.splitlines()[-1]))


def sweep(parts: tuple[int, ...] = PARTS) -> list[SpeedPoint]:
    """The smallest batch on each cluster, and each other batch on the largest."""
    smallest, largest = max(parts), min(parts)
    pairs = [(smallest, part) for part in parts] + [(part, largest) for part in parts if part != smallest]
    return [in_own_process(batch, cluster) for batch, cluster in pairs]


def row_of(points: list[SpeedPoint]) -> Row:
    """The largest batch on the most GPUs against the minute it may take."""
    point = max(points, key=lambda each: (each.gpus, each.trajectories))
    return at_most(
        "simulated production step : a minute, s of a core",
        point.cpu_seconds,
        LIMIT_S,
        1.0,
        f"{point.gpus} GPUs, {point.trajectories} trajectories of {point.turns} turns a step, mode tutti, "
        f"alpha 1; {point.steps} steps in one process, {point.wall_seconds:.0f} s each by the clock",
    )


def row() -> Row:
    """Measure all points and leave them in runs/simulator_speed.json."""
    points = sweep()
    write_points(points, POINTS)
    return row_of(points)


def lines(points: list[SpeedPoint]) -> str:
    head = "  GPUs  trajectories   turns   events  s of a core  s by clock     MB"
    return "\n".join(
        [
            head,
            *(
                f"{each.gpus:6d}  {each.trajectories:12d}  {each.turns:6d}  {each.events:7d}  "
                f"{each.cpu_seconds:11.1f}  {each.wall_seconds:10.1f}  {each.memory_mb:5.0f}"
                for each in points
            ),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smallest", action="store_true", help="only an eighth and a quarter of the size")
    parser.add_argument("--point", nargs=2, type=int, help="measure one, and print it as JSON")
    options = parser.parse_args()
    if options.point:
        print(json.dumps(asdict(measure(*options.point))))
        return
    points = sweep(PARTS[:2] if options.smallest else PARTS)
    print(lines(points))
    if not options.smallest:
        print(table([row_of(points)]))
    write_points(points, POINTS)


if __name__ == "__main__":
    main()
