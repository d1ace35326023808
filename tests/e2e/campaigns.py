"""Small campaigns that train for real in seconds, and what their runs leave."""

from pathlib import Path
from typing import Any

import yaml

from blocks.sample_buffer import SampleBuffer
from infra.object_store import ObjectStore
from tasks.campaign import Campaign
from tasks.run_folder import RunFolder
from tasks.train.manifests import BatchManifest, read_manifests

SUMS = {"source": "tests.bench.domains:Sums", "max_turns": 1, "max_turn_tokens": 4, "max_tokens": 32}


def slow_turns(latency_ms: float = 20, turns: int = 4) -> dict[str, Any]:
    return {
        "source": "tests.bench.domains:SlowTurns",
        "options": {"turns": turns, "latency_ms": latency_ms},
        "max_turns": turns,
        "max_turn_tokens": 4,
        "max_tokens": 96,
    }


def small_campaign(model: Path, runs: Path, **changes: Any) -> Campaign:
    """Two domains, 4 groups of 4; `changes` replace whole top-level options but for `train`, which merges."""
    train = {
        "steps": 6,
        "groups": 4,
        "group_size": 4,
        "algorithm": {"kind": "grpo", "zero_variance": "keep"},
        **changes.pop("train", {}),
    }
    return Campaign.parse(
        {
            "name": "small",
            "model": {"path": str(model)},
            "domains": {"sums": SUMS, "turns": slow_turns()},
            "train": train,
            "stores": {"runs": str(runs)},
            "evaluation": {"episodes": 8},
            **changes,
        }
    )


def saved(campaign: Campaign, folder: Path) -> Path:
    path = folder / "campaign.yaml"
    path.write_text(yaml.safe_dump(campaign.model_dump(mode="json")))
    return path


def buffer_of(campaign: Campaign, run: str) -> SampleBuffer:
    return SampleBuffer(ObjectStore(RunFolder.of(campaign, run).samples_url))


def manifests_of(campaign: Campaign, run: str) -> list[BatchManifest]:
    return list(read_manifests(buffer_of(campaign, run)).values())
