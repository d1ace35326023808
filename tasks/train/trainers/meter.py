"""Sums up the metrics of one train step. Their meanings are in `tasks.train.trainers.base`."""

import math

import torch
from torch import distributed

from tasks.train.algorithms.base import LossTerms


class Meter:
    def __init__(self) -> None:
        self._loss = 0.0
        self._sums: dict[str, float] = {}
        self._maxima: dict[str, float] = {}
        self._padded_tokens = 0
        self._norms: list[float] = []
        self._skipped = 0

    def add(self, terms: LossTerms, padded_tokens: int) -> None:
        """One micro-batch."""
        self._loss += float(terms.loss.detach())
        self._padded_tokens += padded_tokens
        for name, value in terms.sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(value)
        for name, value in terms.maxima.items():
            self._maxima[name] = max(self._maxima.get(name, -math.inf), float(value))

    def optimizer_step(self, gradient_norm: float) -> bool:
        """One mini-batch's gradient; whether it is finite, so that its step may be taken."""
        finite = math.isfinite(gradient_norm)
        if finite:
            self._norms.append(gradient_norm)
        else:
            self._skipped += 1
        return finite

    def gather(self) -> None:
        """Add up what every rank added: losses are shares of one sum, maxima are over all. Collective."""
        names, peaks = sorted(self._sums), sorted(self._maxima)
        sums = [self._loss, float(self._padded_tokens), *(self._sums[name] for name in names)]
        total = torch.tensor(sums, dtype=torch.float64)
        distributed.all_reduce(total)
        highest = torch.tensor([self._maxima[name] for name in peaks], dtype=torch.float64)
        distributed.all_reduce(highest, distributed.ReduceOp.MAX)
        self._loss, padded_tokens, *rest = total.tolist()
        self._padded_tokens = int(padded_tokens)
        self._sums = dict(zip(names, rest, strict=True))
        self._maxima = dict(zip(peaks, highest.tolist(), strict=True))

    def means(self, tokens: int, mini_batches: int) -> dict[str, float]:
        """The metrics, given the trained tokens and the mini-batches of the step."""
        return {
            **{name: value / max(tokens, 1) for name, value in self._sums.items()},
            **self._maxima,
            "train/loss": self._loss / max(mini_batches, 1),
            "train/gradient_norm": sum(self._norms) / max(len(self._norms), 1),
            "train/tokens": float(tokens),
            "train/padded_tokens": float(self._padded_tokens),
            "train/skipped_steps": float(self._skipped if mini_batches else 1),
        }
