"""Whether a part of a run that gives no sign of life is slow or lost. Pure."""

import math


class VitalSigns:
    """Counts the signs of life that a part was asked for in vain, one after the other.

    Counting tries and not seconds makes the limit one of *watched* time: a machine that slept, or a watcher
    that was itself held up, adds one missed sign and not the whole pause.
    """

    def __init__(self, every_s: float, limit_s: float):
        """A part is lost once `limit_s` seconds of tries, `every_s` apart, all failed."""
        self._allowed = max(math.ceil(limit_s / every_s), 1)
        self._missed = 0

    @property
    def lost(self) -> bool:
        return self._missed >= self._allowed

    def heard(self) -> None:
        self._missed = 0

    def unheard(self) -> None:
        self._missed += 1
