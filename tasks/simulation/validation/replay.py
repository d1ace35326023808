"""A recorded stream of requests, served by the modelled schedule instead of the engine it was recorded on."""

import numpy as np

from tasks.rollout.engines.modelled.limits import EngineLimits, IterationTiming
from tasks.rollout.engines.modelled.schedule import ModelledSchedule
from tasks.rollout.engines.modelled.turns import Ended, Turn
from tasks.simulation.validation.serving_run import Requests, Served


def replay(
    requests: Requests, limits: EngineLimits, timing: IterationTiming, kv_tokens: int
) -> tuple[Served, int]:
    """When the requests would have been served, and how often one would have been preempted."""
    schedule = ModelledSchedule(limits, timing, kv_tokens)
    ended: list[Ended] = []
    for index, at in enumerate(requests.arrival.tolist()):
        while (due := schedule.next_event()) is not None and due < at:
            ended += schedule.advance(due, begin=True)
        turn = Turn(str(index), int(requests.context[index]), int(requests.output[index]))
        ended += schedule.submit(at, turn)
    while (due := schedule.next_event()) is not None:
        ended += schedule.advance(due, begin=True)
    first, last = np.zeros(len(requests)), np.zeros(len(requests))
    for end in ended:
        first[int(end.turn.session)] = end.turn.first_at
        last[int(end.turn.session)] = end.at
    return Served(requests, first, last), schedule.counters(0.0).preemptions
