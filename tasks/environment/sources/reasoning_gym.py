"""reasoning-gym's procedural datasets: each seed is one question, answered in one turn.

The environment's own reward is 0: `tasks.reward.functions.reasoning_gym` judges the answer with the
dataset's scorer, from what `info` carries.
"""

import functools
import json
from random import Random
from typing import Any

import reasoning_gym as library
from reasoning_gym.factory import DATASETS

from tasks.environment.sources.base import StepResult


class ReasoningGymEnvironment:
    """One question of a dataset. `options` are the fields of that dataset's configuration.

    The answer is the text between the last `<answer>` and `</answer>`, or the whole response without them.
    """

    def __init__(self, dataset: str, **options: Any):
        if dataset not in DATASETS:
            raise ValueError(f"reasoning-gym has no dataset {dataset!r}")
        if reserved := {"seed", "size"} & options.keys():
            raise ValueError(f"{sorted(reserved)} of reasoning-gym are set for each episode")
        DATASETS[dataset][1](**options)
        self._dataset = dataset
        self._config = json.dumps(options, sort_keys=True)
        self._entry = ""

    def reset(self, seed: int) -> str:
        question, self._entry = _item(self._dataset, self._config, seed)
        return question

    def step(self, action: str) -> StepResult:
        answer = library.utils.extract_answer(action)
        info = {
            "dataset": self._dataset,
            "config": self._config,
            "entry": self._entry,
            "answer": action.strip() if answer is None else answer,
        }
        return StepResult("", 0.0, True, False, info)

    def sample_action(self, draw: Random) -> str | None:
        """The answer to another question of the dataset; None for datasets without one answer a question."""
        _, entry = _item(self._dataset, self._config, draw.getrandbits(30))
        answer = json.loads(entry)["answer"]
        return answer if isinstance(answer, str) else None

    def close(self) -> None:
        return None


@functools.lru_cache(maxsize=1024)  # the members of a group share a seed, and some items take 0.5 s to draw
def _item(dataset: str, config: str, seed: int) -> tuple[str, str]:
    entry = library.create_dataset(dataset, **json.loads(config), seed=seed, size=1)[0]
    return entry["question"], json.dumps(tag(entry))


def tag(value: Any) -> Any:
    """An entry as JSON that keeps tuples and keys that are not text, on which some scorers depend."""
    match value:
        case dict():
            if all(isinstance(key, str) for key in value):
                return {key: tag(item) for key, item in value.items()}
            return {"__items__": [[tag(key), tag(item)] for key, item in value.items()]}
        case tuple():
            return {"__tuple__": [tag(item) for item in value]}
        case list():
            return [tag(item) for item in value]
        case _:
            return value


def untag(value: Any) -> Any:
    """The inverse of `tag`."""
    match value:
        case {"__items__": items}:
            return {untag(key): untag(item) for key, item in items}
        case {"__tuple__": items}:
            return tuple(untag(item) for item in items)
        case dict():
            return {key: untag(item) for key, item in value.items()}
        case list():
            return [untag(item) for item in value]
        case _:
            return value
