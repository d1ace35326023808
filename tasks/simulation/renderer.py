"""The renderer of a simulation: token ids of the right number, of texts that say how many they are."""

import numpy as np

from tasks.environment.rendering import Continuation, Dialogue, Ids

FILLER = 1
"""The id of every token of a prompt or an observation."""


class SimulatedRenderer:
    """`tasks.environment.episode.Renderer`. Its arrays are views of one: do not write to them."""

    def __init__(self) -> None:
        self._filler = np.full(1 << 16, FILLER, np.int32)

    def initial(self, prompt: str, system: str | None = None) -> Ids:
        """`prompt` is the number of tokens, the system prompt's among them."""
        return self._ids(int(prompt))

    def follow(self, dialogue: Dialogue) -> Continuation:
        return Continuation(self._ids(int(dialogue.observations[-1])), fresh=False)

    def decode(self, response: Ids) -> str:
        """The response's first token, which carries what was drawn; nothing of an empty one."""
        return str(int(response[0])) if len(response) else ""

    def _ids(self, count: int) -> Ids:
        if count > len(self._filler):
            self._filler = np.full(max(count, 2 * len(self._filler)), FILLER, np.int32)
        return self._filler[:count]
