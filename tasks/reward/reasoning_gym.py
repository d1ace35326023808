"""The score of reasoning-gym's own scorers, for domains of the source `reasoning_gym`."""

import functools
import json
from typing import Any

import reasoning_gym as library

from tasks.environment.sources.reasoning_gym import untag
from tasks.reward.functions import RewardInput
from tasks.reward.serverless import serverless
from tasks.trajectory import Skip


@serverless
def score(given: RewardInput) -> float | Skip:
    """From 0 to 1, by the dataset's own rule, from the info of `ReasoningGymEnvironment`.

    Without an answer (the episode ended before its only turn) there is nothing to judge. Some scorers raise
    on an answer they cannot parse: one that takes the right answer and not this one makes it wrong.
    """
    if "answer" not in given.info:
        return Skip("the question was not answered")
    entry = untag(json.loads(given.info["entry"]))
    dataset = _dataset(given.info["dataset"], given.info["config"])
    try:
        return float(dataset.score_answer(given.info["answer"], entry))
    except Exception:
        dataset.score_answer(entry["answer"], entry)
        return 0.0


@functools.lru_cache(maxsize=64)
def _dataset(name: str, config: str) -> Any:
    return library.create_dataset(name, **json.loads(config), seed=0, size=1)
