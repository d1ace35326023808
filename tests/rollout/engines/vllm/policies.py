"""Two small policies that vLLM can serve whole or split, and their log-probabilities by transformers."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

from blocks.weight_store import WeightStore, open_weight_store
from tasks.rollout.engines.base import GenerateRequest
from tasks.weights.publication import publish

ROOT = Path(__file__).parents[4]
PYTHON = ROOT / ".venv-vllm/bin/python"
needs_vllm = pytest.mark.skipif(not PYTHON.exists(), reason="there is no .venv-vllm: run `make vllm`")

VOCABULARY = 256
END = 2
MAX_CONTEXT = 4096
# vLLM's CPU attention takes heads of 32; four of them, and two KV heads, can be split in two.
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=MAX_CONTEXT,
    tie_word_embeddings=True,
    initializer_range=0.15,
    bos_token_id=1,
    eos_token_id=END,
    dtype="float32",
)
OLD, NEW = 10, 11  # published versions, of policies 0 and 1
FOREIGN, TORN, INCOMPLETE, UNPUBLISHED = 12, 13, 14, 15  # versions that cannot be taken


@functools.cache
def policy(seed: int) -> LlamaForCausalLM:
    """The end token's logit is 0 throughout, so that greedy sampling never ends a turn."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(CONFIG).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[END] = 0
    return model


def write(folder: Path) -> None:
    """Policy 0 as a model directory, and a weight store with the versions above."""
    policy(0).save_pretrained(folder / "model")
    store = open_weight_store(str(folder / "weights"))
    publish(store, OLD, policy(0).state_dict().items())
    publish(store, NEW, policy(1).state_dict().items())
    weights = dict(policy(1).named_parameters())
    publish(store, FOREIGN, {**weights, "model.norm.weight": torch.ones(64)}.items())
    publish(store, TORN, weights.items())
    publish(store, INCOMPLETE, [each for each in weights.items() if each[0] != "model.norm.weight"])
    _tear(store, folder, TORN)


def _tear(store: WeightStore, folder: Path, version: int) -> None:
    """Change one byte of a tensor in the middle of the version's last bucket."""
    bucket = sorted((folder / "weights").glob(f"v{version:08d}/*/*.safetensors"))[-1]
    data = bytearray(bucket.read_bytes())
    data[len(data) // 2] ^= 1
    bucket.write_bytes(data)


def settings(folder: Path, **engine: Any) -> dict[str, Any]:
    """Of an engine service."""
    return {
        "model": str(folder / "model"),
        "engine": {
            "kind": "vllm",
            "python": str(PYTHON),
            "dtype": "float32",
            "kv_cache_gib": 0.1,
            "max_running": 8,
            "max_batch_tokens": 512,
            **engine,
        },
        "weights": {"url": str(folder / "weights")},
        "max_context": MAX_CONTEXT,
        "token": "a secret of the test",
    }


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, length).tolist()


def request(
    session: str, tokens: list[int], count: int, temperature: float = 1.0, seed: int = 0
) -> GenerateRequest:
    return GenerateRequest(session, np.array(tokens, np.int32), count, temperature, seed)


def logprobs(
    seed: int, context: list[int], sampled: list[int], temperature: float = 1.0
) -> NDArray[np.float32]:
    """Of every token at the positions of `sampled` [sampled, vocabulary], under policy `seed`, in float32."""
    with torch.no_grad():
        logits = policy(seed)(torch.tensor([context + sampled])).logits[0, len(context) - 1 : -1]
    found: NDArray[np.float32] = torch.log_softmax(logits / temperature, -1).numpy()
    return found


def chosen(table: NDArray[np.float32], sampled: list[int]) -> NDArray[np.float32]:
    return table[np.arange(len(sampled)), sampled]
