"""Sampling whose every draw is determined by the request's seed and the index of the sampled token alone.

A request draws from a counter-based generator (Philox) of its own, so neither the batch it runs in, nor the
order of other requests, nor an interruption changes what it draws.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class NonFiniteLogits(RuntimeError):
    """The model returned NaN or infinite logits; its weights are broken."""


def draws(seed: int, count: int) -> NDArray[np.float64]:
    """The first `count` uniform draws in [0, 1) of a seed; a longer call begins with those of a shorter."""
    return np.random.Generator(np.random.Philox(key=seed % 2**128)).random(count)


class SlotSampling:
    """Temperature and draws of the request in each slot."""

    def __init__(self, slots: int, max_context: int):
        self._temperature = np.ones(slots, np.float32)
        self._draws = np.zeros((slots, max_context))

    def begin(self, slot: int, seed: int, temperature: float, count: int, *, first: int = 0) -> None:
        """A request that samples up to `count` tokens, by draws from `first` on of its seed, has the slot."""
        self._temperature[slot] = temperature
        self._draws[slot, :count] = draws(seed, first + count)[first:]

    def sample(
        self, logits: Tensor, slots: NDArray[np.int64], indices: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Sample row r of `logits` [rows, vocabulary] as token `indices[r]` of the request in `slots[r]`."""
        return sample(logits, self._temperature[slots], self._draws[slots, indices])


@torch.inference_mode()
def sample(
    logits: Tensor, temperature: NDArray[np.float32], uniform: NDArray[np.float64]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """One token a row: the cumulative distribution of softmax(logits / temperature) inverted at `uniform`.

    Returns the tokens and their log-probabilities under the distribution sampled from. Temperature 0 takes
    the most probable token, with its log-probability at temperature 1. Raises `NonFiniteLogits`.
    """
    greedy = temperature == 0
    if (temperature != 1).any() and not greedy.all():
        logits = logits / torch.from_numpy(np.where(greedy, np.float32(1), temperature))[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)  # [rows, vocabulary], float32
    if greedy.all():
        tokens = logprobs.argmax(dim=-1, keepdim=True)
    else:
        cumulative = logprobs.exp().cumsum(dim=-1)
        total = cumulative[:, -1:]
        # Rounding must not carry the point up to the total: no token lies above it.
        point = torch.minimum(
            total * torch.from_numpy(uniform)[:, None].to(total.dtype),
            torch.nextafter(total, torch.zeros_like(total)),
        )
        tokens = torch.searchsorted(cumulative, point, right=True)
        if greedy.any():
            most_probable = logprobs.argmax(dim=-1, keepdim=True)
            tokens = torch.where(torch.from_numpy(greedy)[:, None], most_probable, tokens)
    chosen = logprobs.gather(1, tokens.clamp_(max=logits.shape[1] - 1)).squeeze(1)
    if not bool(torch.isfinite(chosen).all()):
        raise NonFiniteLogits("the model returned non-finite logits")
    return tokens.squeeze(1).to(torch.int32).numpy(), chosen.numpy()
