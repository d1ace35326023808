"""Domains and rewards that cause the troubles of the chaos tests, at rates that their seeds draw."""

import time

from tests.bench.domains import Sums


def even_length(episode) -> float:  # type: ignore[no-untyped-def]
    """1 for an answer of an even number of characters, judged in a reward worker."""
    return float(len(episode.actions[0]) % 2 == 0)


def hangs_at_times(episode) -> float:  # type: ignore[no-untyped-def]
    """As `even_length`; one group in six is never judged."""
    while episode.seed % 6 == 5:
        time.sleep(1)
    return even_length(episode)


class Resets(Sums):
    """Sums of which one reset in ten raises."""

    def reset(self, seed: int) -> str:
        if seed % 10 == 3:
            raise RuntimeError("the sandbox did not come up")
        return super().reset(seed)


class Hangs(Sums):
    """Sums of which one episode in twelve never answers its step."""

    def reset(self, seed: int) -> str:
        self._hangs = seed % 12 == 7
        return super().reset(seed)

    def step(self, action: str):  # type: ignore[no-untyped-def]
        while self._hangs:
            time.sleep(1)
        return super().step(action)
