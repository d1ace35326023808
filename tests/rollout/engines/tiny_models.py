"""A tiny random policy for engine tests, and engines of it."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tasks.rollout.config import TorchEngineConfig
from tasks.rollout.engines.base import GenerateRequest
from tasks.rollout.engines.torch import TorchEngine

VOCABULARY = 64
MAX_CONTEXT = 96
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=MAX_CONTEXT,
    tie_word_embeddings=True,
    initializer_range=0.15,
    bos_token_id=1,
    eos_token_id=2,
)


@functools.cache
def make_model(version: int) -> LlamaForCausalLM:
    """The policy of a version: each has other weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(version)
        return LlamaForCausalLM(CONFIG).eval()


def load_version(version: int) -> Iterable[tuple[str, torch.Tensor]]:
    return make_model(version).state_dict().items()


def make_engine(
    version: int = 0,
    stop_tokens: Iterable[int] = (),
    load: Callable[[int], Iterable[tuple[str, Any]]] = load_version,
    **settings: float,
) -> TorchEngine:
    return TorchEngine(
        CONFIG,
        load_version(version),
        settings=TorchEngineConfig(**settings),
        max_context=MAX_CONTEXT,
        stop_tokens=set(stop_tokens),
        load=load,
        version=version,
    )


def request(
    session: str = "s",
    tokens: Iterable[int] = (5, 9, 11),
    count: int = 8,
    temperature: float = 1.0,
    seed: int = 0,
) -> GenerateRequest:
    return GenerateRequest(session, np.array(list(tokens), np.int32), count, temperature, seed)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, length).tolist()
