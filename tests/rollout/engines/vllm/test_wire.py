"""vLLM's answers in the protocol's terms."""

from typing import Any

import numpy as np
import pytest

from infra.rpc import RpcError
from tasks.rollout.engines.base import GenerateRequest
from tasks.rollout.engines.vllm.wire import generation, token_request
from tasks.trajectory import StopReason


def choice(**changes: Any) -> dict[str, Any]:
    return {
        "token_ids": [7, 8, 9],
        "logprobs": {"content": [{"logprob": -0.5}, {"logprob": 0.0}, {"logprob": -3.25}]},
        "weight_versions": [
            {"version": "4", "start": 0, "end": 1},
            {"version": "6", "start": 1, "end": 3},
        ],
        "finish_reason": "length",
        **changes,
    }


def test_spans_of_weight_versions_become_stamps() -> None:
    found = generation(choice(), StopReason.STALE)
    assert found.tokens.tolist() == [7, 8, 9]
    assert found.logprobs.tolist() == [-0.5, 0.0, -3.25]
    assert found.versions.tolist() == [4, 6, 6]
    assert found.stop is StopReason.LENGTH


@pytest.mark.parametrize(
    ("reason", "stop"),
    [("stop", StopReason.STOP), ("length", StopReason.LENGTH), ("abort", StopReason.STALE)],
)
def test_an_abort_ends_for_the_reason_given(reason: str, stop: StopReason) -> None:
    assert generation(choice(finish_reason=reason), StopReason.STALE).stop is stop


def test_a_turn_aborted_before_its_first_token_is_empty() -> None:
    empty = choice(token_ids=[], logprobs={"content": []}, weight_versions=[], finish_reason="abort")
    found = generation(empty, StopReason.CANCELLED)
    assert len(found.tokens) == len(found.logprobs) == len(found.versions) == 0
    assert found.stop is StopReason.CANCELLED


@pytest.mark.parametrize(
    "changes",
    [
        {"weight_versions": None},
        {"weight_versions": [{"version": "4", "start": 0, "end": 2}]},
        {"logprobs": {"content": [{"logprob": -0.5}]}},
        {"logprobs": {"content": [{"logprob": -0.5}, {"logprob": -9999.0}, {"logprob": -1.0}]}},
    ],
)
def test_a_token_without_stamp_or_log_probability_is_an_error(changes: dict[str, Any]) -> None:
    with pytest.raises(RpcError, match="engine_failed"):
        generation(choice(**changes), StopReason.CANCELLED)


def seed(seed: int, sampled_before: int) -> int:
    request = GenerateRequest("s", np.array([5], np.int32), 4, 1.0, seed, sampled_before)
    found: int = token_request("id", request, 4, [2])["sampling_params"]["seed"]
    return found


def test_a_continued_turn_draws_by_a_seed_of_its_own() -> None:
    assert seed(7, 0) == 7
    continued = {seed(base, before) for base in (7, 8) for before in (1, 2, 3)}
    assert len(continued) == 6
    assert all(0 <= each < 2**63 for each in continued)
    assert seed(7, 2) == seed(7, 2)
