"""A reward worker: a warm, killable process that judges episodes, one after the other.

Functions run on its main thread, so that those which use `signal.alarm` work.
"""

import contextlib
from typing import Any

from infra.parent_channel import ParentChannel, serve_in_order
from tasks.reward.functions import RewardError, RewardFunction, RewardInput, judge, resolve
from tasks.trajectory import InfraError, outcome_to_json

_resolved: dict[str, RewardFunction] = {}


def score(payload: list[Any]) -> list[Any]:
    """[name of the function, fields of `RewardInput` in order] -> outcome as JSON."""
    name, fields = payload
    domain, seed, prompt, actions, observations, rewards, stop, info = fields
    given = RewardInput(domain, seed, prompt, tuple(actions), tuple(observations), tuple(rewards), stop, info)
    try:
        function = _resolved.get(name) or _resolved.setdefault(name, resolve(name))
    except RewardError as error:
        return outcome_to_json(InfraError(str(error)))
    return outcome_to_json(judge(name, function, given))


if __name__ == "__main__":
    channel = ParentChannel()
    for wanted in channel.settings["functions"]:
        # Imported now, so that no reward's limit pays for it. What fails here is told when it is called.
        with contextlib.suppress(Exception):
            _resolved[wanted] = resolve(wanted)
    serve_in_order(channel, {"score": score})
