"""vLLM through Tutti against vLLM alone: the same requests, to the same server, in turns.

    python -m tests.bench.vllm_proxy [--model DIRECTORY] [--python INTERPRETER] [--repeats N]

Ours go through the LLM proxy and the engine service, each a process of its own, as in a run; the reference
posts them to the server's token route. Requests have 32 tokens of context and 32 to sample, and a seed, so
that both sides sample equally many.
"""

import argparse
import asyncio
import secrets
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

from infra.clock import now
from infra.processes import ServiceProcess
from infra.rpc import RpcClient
from tasks.rollout.engines.base import GenerateRequest
from tasks.rollout.engines.model_directory import ModelDirectory
from tasks.rollout.engines.vllm.client import VllmClient
from tasks.rollout.engines.vllm.wire import token_request
from tests.bench.rows import Row, at_least, table

ROUNDS = {1: 4, 16: 1, 64: 1}  # requests of each sender in a repeat, by the number of senders
CONTEXT, SAMPLED = 32, 32
TARGET = 0.97
Generate = Callable[[NDArray[np.int32], int], Awaitable[int]]
"""Sends a context and a seed; returns the number of tokens sampled."""


def build_model(directory: Path) -> None:
    """A random Llama of 44 million parameters in bfloat16, with heads that vLLM's CPU kernels take."""
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=11,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        dtype="bfloat16",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


async def through_tutti(proxy: RpcClient, context: NDArray[np.int32], seed: int) -> int:
    trajectory = f"t{secrets.token_hex(8)}"
    answer = await proxy.call(
        "generate",
        {
            "trajectory": trajectory,
            "domain": "bench",
            "tokens": context.astype("<i4").tobytes(),
            "max_new_tokens": SAMPLED,
            "temperature": 1.0,
            "seed": seed,
            "initiating_version": 0,
        },
    )
    await proxy.call("finish", {"trajectories": [trajectory]})
    return len(answer["tokens"]) // 4


async def alone(vllm: VllmClient, stop_tokens: list[int], context: NDArray[np.int32], seed: int) -> int:
    request = GenerateRequest("", context, SAMPLED, 1.0, seed)
    answer = await vllm.generate(token_request(secrets.token_hex(8), request, SAMPLED, stop_tokens))
    choice = answer["choices"][0]
    return len(choice["token_ids"])


async def tokens_per_second(generate: Generate, concurrency: int, vocabulary: int, rounds: int) -> float:
    """`concurrency` senders, each with `rounds` requests one after the other."""

    async def sender(index: int) -> int:
        contexts = np.random.default_rng(index).integers(3, vocabulary, (rounds, CONTEXT), dtype=np.int32)
        return sum([await generate(context, index * rounds + i) for i, context in enumerate(contexts)])

    began = now()
    sampled = sum(await asyncio.gather(*(sender(index) for index in range(concurrency))))
    return sampled / (now() - began)


async def vllm_through_proxy(python: str, model: Path | None = None, repeats: int = 5) -> list[Row]:
    """A row a concurrency: output tokens/s, the best of `repeats` of each side, in turns."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if model is None:
            model = folder / "model"
            build_model(model)
        directory = ModelDirectory.open(model)
        token = secrets.token_urlsafe(16)
        engine = await ServiceProcess.start(
            "engine",
            "tests.bench.vllm_service",
            {
                "model": str(model),
                "engine": {"kind": "vllm", "python": python, "kv_cache_gib": 1.0, "max_running": 64},
                "weights": {"url": str(folder / "weights")},
                "max_context": 512,
                "token": token,
            },
            folder / "engine.log",
            start_limit_s=600,
        )
        proxy = await ServiceProcess.start(
            "proxy",
            "tasks.rollout.proxy_service",
            {
                "engines": [{"name": "engine", "url": engine.url, "token": token}],
                "generate_limit_s": 600.0,
                "token": token,
            },
            folder / "proxy.log",
        )
        client = await RpcClient(proxy.url, token=token).connect()
        vllm = VllmClient(engine.ready["vllm_url"], engine.ready["vllm_token"])
        stops = sorted(directory.stop_tokens)

        def ours(context: NDArray[np.int32], seed: int) -> Awaitable[int]:
            return through_tutti(client, context, seed)

        def reference(context: NDArray[np.int32], seed: int) -> Awaitable[int]:
            return alone(vllm, stops, context, seed)

        try:
            rows = []
            for concurrency in ROUNDS:
                rows.append(await _row(ours, reference, concurrency, directory.config.vocab_size, repeats))
                print(table(rows[-1:]), flush=True)
            return rows
        finally:
            await vllm.close()
            await client.close()
            await proxy.stop()
            await engine.stop()


async def _row(ours: Generate, reference: Generate, concurrency: int, vocabulary: int, repeats: int) -> Row:
    rounds = ROUNDS[concurrency]
    sides: list[list[float]] = [[], []]
    for side in (ours, reference):
        await tokens_per_second(side, concurrency, vocabulary, 1)  # warm-up
    for _ in range(repeats):
        for side, speeds in zip((ours, reference), sides, strict=True):
            speeds.append(await tokens_per_second(side, concurrency, vocabulary, rounds))
    return at_least(
        f"vLLM through the proxy : vLLM alone, tokens/s at {concurrency}",
        max(sides[0]),
        max(sides[1]),
        TARGET,
        f"{CONTEXT} tokens in, {SAMPLED} out, {rounds * concurrency} requests a repeat, one server; "
        f"best of {repeats} repeats in turns",
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, help="a Llama directory; without it, a random one is built")
    parser.add_argument("--python", default=".venv-vllm/bin/python")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    print(table(asyncio.run(vllm_through_proxy(arguments.python, arguments.model, arguments.repeats))))


if __name__ == "__main__":
    main()
