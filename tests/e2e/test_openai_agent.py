"""Agents that use the `openai` client, trained by the whole loop."""

import sys
from pathlib import Path

import psutil
import pytest

from tasks.report.run_files import RunFiles
from tasks.train.archive import read_archive
from tests.e2e.campaigns import buffer_of, manifests_of, small_campaign
from tests.e2e.drive import drive
from tests.environment.openai.engine_proxy import save

pytestmark = pytest.mark.slow

AGENT = str(Path(__file__).with_name("openai_agent.py"))
BUDGETS = {"max_turns": 8, "max_turn_tokens": 12, "max_tokens": 700}


async def test_an_unmodified_agent_is_trained_token_for_token(tmp_path: Path) -> None:
    campaign = small_campaign(
        save(tmp_path / "model"),
        tmp_path / "runs",
        domains={
            "program": {
                "source": "agent",
                "options": {"command": [sys.executable, AGENT], "timeout_s": 120},
                **BUDGETS,
            },
            "function": {
                "source": "agent",
                "options": {
                    "function": "tests.environment.openai.agents:several_conversations",
                    "timeout_s": 120,
                },
                **BUDGETS,
            },
        },
        train={"steps": 2, "mode": "sync", "alpha": 0, "groups": 2, "group_size": 2},
    )
    await drive(campaign, "run")

    manifests = manifests_of(campaign, "run")
    assert [len(manifest.names) for manifest in manifests] == [4, 4]
    archive = buffer_of(campaign, "run").store
    for manifest in manifests:
        trajectories = read_archive(archive, manifest.step)
        assert [str(trajectory.key) for trajectory in trajectories] == manifest.names
        for trajectory in trajectories:
            program = trajectory.domain == "program"
            assert len(trajectory.segment_starts) == (2 if program else 4)
            assert len(trajectory.turns) == (3 if program else 7)
            assert set(trajectory.versions[trajectory.loss_mask].tolist()) == {manifest.step}
            said = trajectory.info["verdict" if program else "streamed"]
            assert said in [turn.action for turn in trajectory.turns]

    # On policy, the trainer finds for every sampled token, in every segment, what the engine reported.
    for row in RunFiles(tmp_path / "runs/run").read_metrics():
        assert row["train/kl_behaviour"] == pytest.approx(0, abs=1e-6)
        assert row["train/importance_max"] == pytest.approx(1, abs=1e-3)
    assert [line for line in _command_lines() if AGENT in line] == []


def _command_lines() -> list[list[str]]:
    lines = []
    for process in psutil.Process().children(recursive=True):
        try:
            lines.append(process.cmdline())
        except psutil.NoSuchProcess:
            continue
    return lines
