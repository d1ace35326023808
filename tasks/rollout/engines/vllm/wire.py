"""A turn as vLLM's token route has it: the request and the answer of `/inference/v1/generate`."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from infra.rpc import RpcError
from tasks.rollout.engines.base import GenerateRequest, Generation
from tasks.rollout.engines.batch_schedule import Sampled
from tasks.trajectory import StopReason

_NO_LOGPROB = -9999.0  # a log-probability that is NaN or -inf


def token_request(
    request_id: str, request: GenerateRequest, max_new_tokens: int, stop_tokens: Sequence[int]
) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "token_ids": request.tokens.tolist(),
        "sampling_params": {
            "max_tokens": max_new_tokens,
            "temperature": request.temperature,
            "seed": _seed(request),
            "stop_token_ids": list(stop_tokens),
            "ignore_eos": True,  # the model's own end tokens are among these
            "logprobs": 0,
            "detokenize": False,
        },
    }


def _seed(request: GenerateRequest) -> int:
    """vLLM's draws begin where its request does. A turn that goes on after an interruption draws afresh, by a
    seed of its own: its first draws again would make the rest depend on what was sampled before."""
    if not request.sampled_before:
        return request.seed
    digest = hashlib.blake2b(f"{request.seed}:{request.sampled_before}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # vLLM takes 63 bits


def sampled_so_far(answer: Mapping[str, Any], start: int) -> Sampled | None:
    """What a request in flight has sampled from token `start` on, as the door tells it.

    None where a token lacks a stamp or a finite log-probability.
    """
    tokens = np.array(answer["tokens"], np.int32)
    logprobs = np.array(answer["logprobs"], np.float32)
    versions = np.full(start + len(tokens), -1, np.int32)
    for version, first in answer["weight_versions"]:
        if not version.isdecimal():
            return None
        versions[first:] = int(version)
    if len(logprobs) != len(tokens) or (versions < 0).any() or not (logprobs > _NO_LOGPROB).all():
        return None
    return Sampled(tokens, logprobs, versions[start:])


def generation(choice: dict[str, Any], aborted: StopReason) -> Generation:
    """vLLM's choice in the protocol's terms; `aborted` is the stop of a request that was aborted.

    Raises `RpcError` of code `engine_failed` where a token lacks a stamp or a finite log-probability.
    """
    tokens = np.array(choice["token_ids"], np.int32)
    logprobs = np.array([each["logprob"] for each in choice["logprobs"]["content"]], np.float32)
    versions = np.full(len(tokens), -1, np.int32)
    for span in choice["weight_versions"] or ():
        versions[span["start"] : span["end"]] = int(span["version"])
    if len(logprobs) != len(tokens) or (versions < 0).any():
        raise RpcError("engine_failed", "vLLM returned tokens without log-probability or weight version")
    if (logprobs <= _NO_LOGPROB).any():
        raise RpcError("engine_failed", "the model returned non-finite logits; its weights are broken")
    reasons = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": aborted}
    return Generation(tokens, logprobs, versions, reasons[choice["finish_reason"]])
