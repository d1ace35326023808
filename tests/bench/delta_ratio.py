"""Bytes of a lossless delta over bytes of the full version, on consecutive versions of SmolLM2-135M.

    python -m tests.bench.delta_ratio MODEL_DIRECTORY

prints a JSON line a row. The model (`python -m tasks.model.smollm MODEL_DIRECTORY`) is trained in float32
with AdamW on batches like those of RL: questions of reasoning-gym and answers, half of them right, by policy
gradient with advantages of +1 and -1. Every step is published in bfloat16 by the publisher of the real loop.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reasoning_gym
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from blocks.weight_store import open_weight_store
from tasks.weights.config import PublicationConfig
from tasks.weights.publication import Publisher, load
from tests.bench.rows import Row, at_most

TARGETS = {1e-6: 0.01, 5e-6: 0.03, 3e-5: 0.1}
WARM_UP, STEPS = 2, 4
SEQUENCES, TOKENS = 4, 64


def rows(model: Path) -> Iterator[Row]:
    how = (
        f"SmolLM2-135M in bfloat16, float32 AdamW, policy gradient on reasoning-gym answers, {SEQUENCES} x "
        f"{TOKENS} tokens; mean of {STEPS} versions after {WARM_UP}; bytes"
    )
    for rate, target in TARGETS.items():
        sizes = measure(model, rate)
        yield at_most(f"delta : full version, learning rate {rate:g}", *sizes, target, how)


def measure(directory: Path, learning_rate: float) -> tuple[float, float]:
    """Mean bytes of a delta, and bytes of the full version."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    with tempfile.TemporaryDirectory() as folder:
        store = open_weight_store(folder)
        publisher = Publisher(
            store, PublicationConfig(dtype="bfloat16", delta=True, snapshot_every=WARM_UP + STEPS + 1)
        )
        deltas, full = [], 0
        for step in range(WARM_UP + STEPS):
            train_step(model, tokenizer, optimizer, step)
            publication = publisher.publish(step, model.named_parameters())
            if step >= WARM_UP:
                assert publication.depth == step, "the delta was not smaller than the full version"
                deltas.append(publication.delta_size)
                full = publication.content_size
        last = load(store, step)  # through every delta since the snapshot
        for name, parameter in model.named_parameters():
            assert torch.equal(last[name].view(torch.int16), parameter.detach().bfloat16().view(torch.int16))
        publisher.close()
    return sum(deltas) / len(deltas), float(full)


def train_step(model: torch.nn.Module, tokenizer: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    questions = reasoning_gym.create_dataset("chain_sum", seed=step, size=SEQUENCES)
    optimizer.zero_grad()
    for index, item in enumerate(questions):
        advantage = 1.0 if index % 2 == 0 else -1.0
        answer = item["answer"] if advantage > 0 else str(int(item["answer"]) + 1 + index)
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": item["question"]}], tokenize=False, add_generation_prompt=True
        )
        prefix = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        response = tokenizer(f"The answer is {answer}.<|im_end|>", add_special_tokens=False)["input_ids"]
        ids = torch.tensor([prefix[-(TOKENS - len(response)) :] + response])
        logprobs = torch.log_softmax(model(ids).logits[0, :-1].float(), -1)
        chosen = logprobs.gather(1, ids[0, 1:, None])[-len(response) :]
        (-advantage * chosen.mean() / SEQUENCES).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    for row in rows(parser.parse_args().model):
        print(json.dumps([row.name, row.ours, row.reference, row.ratio]), flush=True)


if __name__ == "__main__":
    main()
