"""`make bench`: prints the benchmark's rows and writes them to runs/bench.json.

Every row is a ratio of two things measured in one run on one machine, in turns where that is possible.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tasks.campaign import Campaign
from tests.bench import (
    buffer_s3,
    delta_ratio,
    exposed_update,
    interaction,
    modes,
    mooncake_copy,
    prefill_decode,
    proxy_alone,
    reward_utilisation,
    simulator_speed,
    small_llama,
    virtual_time,
)
from tests.bench.loops import WARM_UP_STEPS, LoopTimes, run_loop, slow_turns, sums
from tests.bench.rows import Row, at_least, at_most, table, write
from tests.bench.vllm_proxy import vllm_through_proxy

ROOT = Path(__file__).parents[2]
LAPTOP = ROOT / "flows/campaigns/laptop.yaml"
SMOLLM = ROOT / "models/smollm2-135m-instruct"
CONTROL_PLANE = ["proxy", "interaction", "modes", "exposed", "reward"]
SERVICES = ["vllm", "s3", "mooncake", "delta"]
KINDS = ["trainer", "trl", "sync", "flow", "pd", *SERVICES, *CONTROL_PLANE, "simulator"]
TURNS, LATENCY_MS = 4, 50.0


def trainer_against_bare_loop(model: Path) -> Row:
    run = subprocess.run(
        [sys.executable, "-m", "tests.bench.trainer_speed", str(model)], check=True, capture_output=True
    )
    speeds = json.loads(run.stdout.splitlines()[-1])
    return at_least(
        "trainer tokens/s : bare forward-backward loop",
        speeds["ours"],
        speeds["reference"],
        0.9,
        "64 sequences of 13 to 64 tokens, 2.2M Llama, 1 thread; 20 steps each in turns, medians",
    )


async def async_against_sync(repeats: int) -> Row:
    """The laptop's own campaign, the same steps in both modes."""
    times: dict[str, list[LoopTimes]] = {"tutti": [], "sync": []}
    for _ in range(repeats):
        for mode, alpha in (("tutti", 1), ("sync", 0)):
            campaign = Campaign.load(
                LAPTOP,
                [
                    "train.steps=13",
                    f"train.mode={mode}",
                    f"train.alpha={alpha}",
                    "train.checkpoint.every=1000",
                ],
            )
            times[mode].append(await run_loop(campaign))
    return at_least(
        "async loop : sync loop, steps/s",
        1 / _median_step(times["tutti"]),
        1 / _median_step(times["sync"]),
        1.0,
        f"laptop campaign, 10 steps after warm-up, {repeats} runs of each in turns, median step",
    )


async def flow_against_direct_loop(repeats: int) -> Row:
    times: dict[bool, list[LoopTimes]] = {True: [], False: []}
    campaign = Campaign.load(LAPTOP, ["train.steps=13"])
    for _ in range(repeats):
        for prefect in (True, False):
            times[prefect].append(await run_loop(campaign, prefect=prefect))
    return at_most(
        "flow : the same loop without Prefect, s/step",
        _median_step(times[True]),
        _median_step(times[False]),
        1.05,
        f"laptop campaign, artifacts each step, 10 steps after warm-up, {repeats} runs each in turns, median",
    )


async def loop_against_trl(model: Path, trl_python: Path, repeats: int, *, multi_turn: bool) -> Row:
    steps = 23
    arguments = ["--multi-turn", "--turns", str(TURNS), "--latency-ms", str(LATENCY_MS)] if multi_turn else []
    script = Path(__file__).parent / "trl_reference.py"
    ours, theirs = [], []
    for seed in range(repeats):
        command = [str(trl_python), str(script), "--model", str(model), "--steps", str(steps)]
        process = await asyncio.create_subprocess_exec(
            *command, "--seed", str(seed), *arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        output, _ = await process.communicate()
        theirs.append(json.loads(output.splitlines()[-1])["trajectories_per_second"])
        campaign = (
            slow_turns(model, steps=steps, turns=TURNS, latency_ms=LATENCY_MS)
            if multi_turn
            else sums(model, steps=steps)
        )
        ours.append((await run_loop(campaign)).trajectories_per_second)
    what = f"{TURNS} turns with {LATENCY_MS:.0f} ms of environment" if multi_turn else "single-digit sums"
    return at_least(
        f"laptop loop : TRL GRPO, trajectories/s, {'multi-turn' if multi_turn else 'one turn'}",
        statistics.median(ours),
        statistics.median(theirs),
        1.0,
        f"{what}, 2.2M Llama, 8 x 8 a step; {steps - WARM_UP_STEPS} steps, {repeats} runs each, medians",
    )


async def control_plane_rows(kind: str, repeats: int) -> list[Row]:
    """Of the control plane alone: engines are instant or their durations injected, but for `exposed`."""
    if kind == "proxy":
        return await asyncio.to_thread(proxy_alone.in_own_process)
    if kind == "interaction":
        return await interaction.rows(interaction.Work(), list(interaction.TARGETS))
    if kind == "modes":
        return await modes.rows(modes.Work(repeats=repeats))
    if kind == "reward":
        return await reward_utilisation.rows()
    return [await exposed_update.row(SMOLLM if SMOLLM.exists() else None)]


def _median_step(times: list[LoopTimes]) -> float:
    return statistics.median(second for run in times for second in run.step_seconds)


async def bench(trl_python: Path | None, vllm_python: Path, kinds: list[str], repeats: int) -> list[Row]:
    rows: list[Row] = []

    def add(row: Row) -> None:
        print(f"{row.name}: {row.ratio:.3f} ({row.target})", flush=True)
        rows.append(row)

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        small_llama.build(model)
        if "trainer" in kinds:
            add(trainer_against_bare_loop(model))
        if "trl" in kinds and trl_python is not None:
            add(await loop_against_trl(model, trl_python, repeats, multi_turn=False))
            add(await loop_against_trl(model, trl_python, repeats, multi_turn=True))
        if "pd" in kinds:
            for row in await prefill_decode.rows(model, repeats):
                add(row)
        if "sync" in kinds:
            add(await async_against_sync(repeats))
        if "flow" in kinds:
            add(await flow_against_direct_loop(repeats))
    if "vllm" in kinds:
        for row in await vllm_through_proxy(str(vllm_python), SMOLLM if SMOLLM.exists() else None, repeats):
            add(row)
    if "s3" in kinds:
        for row in await asyncio.to_thread(buffer_s3.measure, repeats + 3):
            add(row)
    if "mooncake" in kinds:
        for row in mooncake_copy.rows():
            add(row)
    if "delta" in kinds and SMOLLM.exists():
        for row in delta_ratio.rows(SMOLLM):
            add(row)
    for kind in CONTROL_PLANE:
        if kind in kinds:
            for row in await control_plane_rows(kind, repeats):
                add(row)
    if "simulator" in kinds:
        add(await asyncio.to_thread(virtual_time.measure))
        add(await asyncio.to_thread(simulator_speed.row))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--trl-python", type=Path, help="python of TRL's environment; without it, no TRL rows"
    )
    parser.add_argument("--vllm-python", type=Path, default=Path(".venv-vllm/bin/python"))
    parser.add_argument("--only", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--repeats", type=int, default=2, help="runs of each side of the loop rows")
    parser.add_argument("--out", type=Path, default=Path("runs/bench.json"))
    arguments: Any = parser.parse_args()
    rows = asyncio.run(bench(arguments.trl_python, arguments.vllm_python, arguments.only, arguments.repeats))
    write(rows, arguments.out)
    print(table(rows))


if __name__ == "__main__":
    main()
