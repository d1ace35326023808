"""A reward that asks to run as a remote function."""

import os

from tasks.reward.functions import RewardInput
from tasks.reward.serverless import serverless


@serverless(limit_s=5)
def even_length(given: RewardInput) -> float:
    """1 for an answer of an even number of characters; leaves its process's id where the test looks."""
    folder = os.environ.get("TUTTI_TEST_REWARD_PIDS")
    if folder:
        with open(os.path.join(folder, str(os.getpid())), "a"):
            pass
    return float(len(given.actions[0]) % 2 == 0)
