"""A domain that fails in every way. Light to import: each hang costs a new environment host."""


class Troubled:
    """An environment of which some episodes raise or hang, by their seed."""

    def reset(self, seed: int) -> str:
        self._trouble = seed % 3
        return "1+1="

    def step(self, action: str):  # type: ignore[no-untyped-def]
        from tasks.environment.sources.base import StepResult

        if self._trouble == 1:
            raise RuntimeError("the world ends")
        while self._trouble == 2:
            pass
        return StepResult("", float(len(action) % 2), True)

    def close(self) -> None: ...


def raises_at_times(episode) -> float | None:  # type: ignore[no-untyped-def]
    """A reward that fails on some answers."""
    if len(episode.actions[0]) % 3 == 0:
        raise ValueError("cannot judge this")
    return float(len(episode.actions[0]) % 2)
