"""Recorded runs made up from the schedule itself, with coefficients that the fit is not told."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from infra.hardware import hardware
from infra.models import model_of
from infra.performance.coefficients import DEFAULT
from infra.performance.iteration import IterationModel
from tasks.rollout.engines.modelled.limits import EngineLimits
from tasks.simulation.validation.replay import replay
from tasks.simulation.validation.serving_run import Requests, Served

HIDDEN = {"gemm_bandwidth": 0.66, "gemm_compute": 0.51, "kv_bandwidth": 0.8}
KV_TOKENS = 30_000


def served(count: int, seed: int = 1) -> Served:
    """Requests to Llama-3.1-8B on an RTX 4090 that has to preempt some of them."""
    draw = np.random.default_rng(seed)
    requests = Requests(
        np.concatenate([[0.0], np.cumsum(draw.exponential(0.1, count - 1))]),
        draw.integers(20, 2000, count),
        draw.integers(50, 700, count),
    )
    timing = IterationModel(
        model_of("llama-3.1-8b"), hardware("rtx4090"), coefficients=DEFAULT.changed(HIDDEN)
    )
    result, preempted = replay(requests, EngineLimits(64, 2048, 16384), timing, KV_TOKENS)
    assert preempted
    return result


def write(folder: Path, run: Served) -> list[dict[str, Any]]:
    """As LLMServingSim's `bench run` records it; clocks begin somewhere. Returns the rows."""
    folder.mkdir(parents=True)
    engine = {
        "model": "meta-llama/Llama-3.1-8B",
        "tensor_parallel_size": 1,
        "data_parallel_size": 1,
        "enable_expert_parallel": False,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
    }
    requests = run.requests
    meta = {
        "engine_kwargs": engine,
        "num_requests": len(requests),
        "kv_cache": {"num_kv_tokens": KV_TOKENS},
    }
    (folder / "meta.json").write_text(json.dumps(meta))
    described = {"nodes": [{"instances": [{"hardware": "RTX4090"}]}]}
    (folder / "config.json").write_text(json.dumps(described))
    rows = [
        {
            "request_id": f"bench-{index}",
            "input_toks": int(requests.context[index]),
            "output_toks": int(requests.output[index]),
            "arrival_time": 1.7e9 + requests.arrival[index],
            "queued_ts": 500.0 + requests.arrival[index],
            "scheduled_ts": 500.0 + requests.arrival[index],
            "first_token_ts": 500.0 + run.first[index],
            "last_token_ts": 500.0 + run.last[index],
        }
        for index in range(len(requests))
    ]
    write_rows(folder, rows)
    return rows


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
