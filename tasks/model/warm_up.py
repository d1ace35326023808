"""Supervised warm-up of a small policy on demonstrations: cross-entropy on the responses, nothing else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tasks.model.config import WarmUpConfig
from tasks.model.demonstrations import Demonstration
from tasks.train.micro_batches import cut_micro_batches
from tasks.train.trainers.logprobs import TokenLogprobs

_SHORT_TURNS = 2
_WHOLE_SHARE = 1 / 16  # whole episodes show the later turns; short ones teach the same form for less compute
_MICRO_BATCH_TOKENS = 4096
_MAX_GRADIENT_NORM = 1.0
# The learning rate rises in this share of the steps, then falls to 0, which averages out what single batches
# of random actions say.
_RISE = 0.1


@dataclass(frozen=True, slots=True)
class WarmUpResult:
    losses: list[float]  # nats a response token, by step
    trained_tokens: int  # context and responses


def warm_up(
    model: PreTrainedModel,
    demonstrations: Mapping[str, Sequence[Demonstration]],
    config: WarmUpConfig,
    seed: int,
) -> WarmUpResult:
    """Train `model` in place on batches in which every domain has the same share.

    The loss is the mean negative log-probability of the batch's response tokens, end tokens included. The
    same seed, model and demonstrations give the same weights.
    """
    draw = Random(f"warm-up {seed}")
    score = TokenLogprobs(model, temperature=1.0)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, config.steps))
    losses: list[float] = []
    trained_tokens = 0
    model.train()
    for _ in range(config.steps):
        batch = _draw_batch(demonstrations, config.batch_size, draw)
        responses = sum(int(item.loss_mask.sum()) for item in batch)
        lengths = [len(item.tokens) for item in batch]
        loss = 0.0
        for rows in cut_micro_batches(lengths, max(_MICRO_BATCH_TOKENS, *lengths)):
            tokens_BT, mask_BT = _pad([batch[row] for row in rows])
            logprobs_BT, _ = score(tokens_BT, mask_BT)
            part = -logprobs_BT.sum() / responses
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss)
        trained_tokens += sum(lengths)
    model.eval()
    return WarmUpResult(losses, trained_tokens)


def _rate(step: int, steps: int) -> float:
    """Factor on the learning rate: a linear rise, then a linear fall to 0 after the last step."""
    rise = max(_RISE * steps, 1.0)
    return min((step + 1) / rise, (steps - step) / max(steps - rise, 1.0))


def _draw_batch(
    demonstrations: Mapping[str, Sequence[Demonstration]], size: int, draw: Random
) -> list[Demonstration]:
    """Domains in turn, so that the batch is balanced; a random episode of each, mostly cut short."""
    domains = sorted(demonstrations)
    draw.shuffle(domains)
    batch = []
    for index in range(size):
        demonstration = draw.choice(demonstrations[domains[index % len(domains)]])
        whole = draw.random() < _WHOLE_SHARE
        batch.append(demonstration if whole else demonstration.first(draw.randint(1, _SHORT_TURNS)))
    return batch


def _pad(batch: Sequence[Demonstration]) -> tuple[Tensor, Tensor]:
    """Token ids and loss mask, [B, T], padded on the right with id 0, which the mask leaves out."""
    longest = max(len(item.tokens) for item in batch)
    tokens_BT = torch.zeros((len(batch), longest), dtype=torch.int64)
    mask_BT = torch.zeros((len(batch), longest), dtype=torch.bool)
    for row, item in enumerate(batch):
        tokens_BT[row, : len(item.tokens)] = torch.from_numpy(item.tokens)
        mask_BT[row, : len(item.tokens)] = torch.from_numpy(item.loss_mask)
    return tokens_BT, mask_BT
