"""The place of the proxy, taken by one real engine with a small random policy; its answers are recorded."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from infra.rpc import RpcConnection, RpcServer
from tasks.environment.worker import EnvironmentWorker
from tasks.rollout.config import TorchEngineConfig
from tasks.rollout.engines.base import GenerateRequest, Generation
from tasks.rollout.engines.torch import TorchEngine
from tasks.trajectory import StopReason
from tests.environment import chat
from tests.environment.openai.templates import WITH_TOOLS

MAX_CONTEXT = 1024
CONFIG = LlamaConfig(
    vocab_size=3 + 96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=MAX_CONTEXT,
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_id=2,
    pad_token_id=0,
)


def policy() -> LlamaForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(CONFIG).eval()


def save(directory: Path) -> Path:
    """A model directory, for engines, trainer and tokenizer."""
    policy().save_pretrained(directory)
    config = (directory / "config.json").read_text()
    chat.save(directory, WITH_TOOLS)
    (directory / "config.json").write_text(config)
    return directory


@dataclass
class EngineProxy:
    engine: TorchEngine
    answers: list[tuple[dict[str, Any], Generation]] = field(default_factory=list)
    began: list[str] = field(default_factory=list)
    busy: asyncio.Event = field(default_factory=asyncio.Event)  # once four calls have begun
    finished: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)

    def serve(self) -> RpcServer:
        handlers = {"generate": self.generate, "finish": self.finish, "abort": self.abort}
        self.server = RpcServer(handlers, token="secret")
        return self.server

    async def generate(self, payload: dict[str, Any], _: RpcConnection) -> dict[str, Any]:
        self.began.append(payload["trajectory"])
        if len(self.began) == 4:
            self.busy.set()
        request = GenerateRequest(
            payload["trajectory"],
            np.frombuffer(payload["tokens"], np.int32),
            payload["max_new_tokens"],
            payload["temperature"],
            payload["seed"],
        )
        generation = await self.engine.generate(request)
        self.answers.append((payload, generation))
        return {
            "tokens": generation.tokens.tobytes(),
            "logprobs": generation.logprobs.tobytes(),
            "versions": generation.versions.tobytes(),
            "stop": generation.stop.value,
        }

    async def finish(self, payload: dict[str, Any], _: RpcConnection) -> None:
        self.finished += payload["trajectories"]
        for name in payload["trajectories"]:
            await self.engine.end_session(name)

    async def abort(self, payload: dict[str, Any], _: RpcConnection | None = None) -> None:
        self.aborted += payload["trajectories"]
        await self.server.broadcast("abort", payload)
        await self.engine.abort(payload["trajectories"], StopReason(payload["reason"]))


@asynccontextmanager
async def working(
    directory: Path, domains: dict[str, Any], **environment: Any
) -> AsyncIterator[tuple[EngineProxy, EnvironmentWorker]]:
    """A worker of `domains` before a real engine."""
    model = save(directory / "model")
    engine = TorchEngine(
        CONFIG,
        policy().state_dict().items(),
        settings=TorchEngineConfig(),
        max_context=MAX_CONTEXT,
        stop_tokens={2},
        load=lambda version: policy().state_dict().items(),
    )
    async with engine:
        proxy = EngineProxy(engine)
        url = await proxy.serve().start()
        worker = await EnvironmentWorker.start(
            {
                "proxy": {"url": url, "token": "secret"},
                "campaign": {
                    "name": "test",
                    "model": {"path": str(model)},
                    "domains": domains,
                    "environment": environment,
                },
                "model": str(model),
                "samples": {"url": str(directory / "samples")},
                "topic": "ended",
            }
        )
        yield proxy, worker
        await worker.close()
        await proxy.server.stop()
