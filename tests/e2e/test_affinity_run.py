"""Real runs on two named pools of this machine: domains keep to their pools, fall back, and are re-bound."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from flows.preparation import open_run
from infra.launcher import LocalService
from tasks.bindings import BindingsFile
from tasks.campaign import Campaign
from tasks.open_session import open_session
from tasks.report.html import write_report
from tasks.rollout.affinity import bind_domains, domain_manager
from tasks.train.loop import directly, train_loop
from tests.e2e.campaigns import small_campaign

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
POOLS = {"fast": "h800", "wide": "h20"}
MAPPED = {"sums": "fast", "turns": "wide", "default": "wide"}


def campaign(model: Path, runs: Path, steps: int, **affinity: Any) -> Campaign:
    return small_campaign(
        model,
        runs,
        train={"steps": steps, "groups": 2},
        rollout={"engine": {"kind": "torch", "workers": 2}, "worker_restarts": 0},
        environment={"workers": 1},
        affinity={"local_pools": POOLS, "domains": MAPPED, **affinity},
    )


async def test_domains_keep_to_their_pools_fall_back_and_are_rebound(model: Path, tmp_path: Path) -> None:
    first = campaign(model, tmp_path, steps=3)
    folder = open_run(first, "run")
    async with open_session(first, folder) as session:
        before: dict[str, dict[str, int]] = {}

        async def kill_the_fast_pool(row: dict[str, Any]) -> None:
            if row["step"] == 0:
                before.update(await session.fleet.served())
                engine = session.fleet.engines[0]
                assert isinstance(engine, LocalService)
                os.kill(engine.process.process.pid, signal.SIGKILL)

        session.observers.append(kill_the_fast_pool)
        await train_loop(session, directly(session))
        after = await session.fleet.served()
        assert await session.fleet.serving_pools() == ["wide"]
    assert {domain: list(pools) for domain, pools in before.items()} == {"sums": ["fast"], "turns": ["wide"]}
    assert after["sums"]["wide"] > 0
    assert list(after["turns"]) == ["wide"]
    warnings = [
        line for line in (folder.logs / "proxy.log").read_text().splitlines() if "prefers pool" in line
    ]
    assert len(warnings) == 1
    assert "'sums' prefers pool 'fast'" in warnings[0]
    assert "'wide'" in warnings[0]

    # The restarted run has the same bindings. By the catalogue, an H800 is the better one for the larger of
    # these domains, so the profile swaps them.
    second = campaign(model, tmp_path, steps=6, profile="apply", patience=1, gain=0.01)
    async with open_session(second, folder) as session:
        assert session.affinity is not None
        assert session.affinity.mapping == {"sums": "fast", "turns": "wide"}
        await train_loop(session, directly(session))
        await session.observed()
        served = await session.fleet.served()
        assert session.affinity.mapping == {"sums": "wide", "turns": "fast"}
    assert served["turns"]["fast"] > 0
    record = BindingsFile(folder.root).read()
    assert record.changes[0]["mapping"] == {"sums": "wide", "turns": "fast"}
    assert [reason.split(":")[0] for reason in record.changes[0]["reasons"]] == ["sums", "turns"]
    assert record.advice is not None
    assert record.advice["bound"] == {"sums": "wide", "turns": "fast"}
    moved = {entry.subject: (entry.requested, entry.pool) for entry in record.bindings}
    assert moved["domain:turns"] == ("wide", "fast")
    assert json.loads(record.model_dump_json()) == json.loads(BindingsFile(folder.root).path.read_text())

    assert "re-bound new trajectories after step 3" in write_report(folder.root).read_text()

    file = BindingsFile(folder.root)
    kept = bind_domains(second, domain_manager(second, tuple(POOLS), file), file)
    assert kept.pools == {"sums": "wide", "turns": "fast", "default": "wide"}
