"""An engine in its steady state: time per token and latency under a steady load, in closed form.

Every request has the same prompt and response lengths. While a request decodes, prompts of others are
prefilled between its tokens: in the time of one token come r x t prompts, r a second, each taking p more than
an iteration without it, so t = d / (1 - r p), d the decode iteration of the requests that are running.
"""

from dataclasses import dataclass

from infra.performance.iteration import BatchWork, IterationModel

ROUNDS = 200


class Overloaded(ValueError):
    """The engine cannot keep up with the load."""


@dataclass(frozen=True, slots=True)
class Load:
    prompt_tokens: int
    response_tokens: int


@dataclass(frozen=True, slots=True)
class Steady:
    running: float  # requests, on average
    first_token_s: float
    token_s: float

    def latency_s(self, load: Load) -> float:
        return self.first_token_s + load.response_tokens * self.token_s


def under_rate(model: IterationModel, load: Load, rate: float) -> Steady:
    """With `rate` requests a second. Raises `Overloaded`."""
    running = 1.0
    for _ in range(ROUNDS):
        found = _state(model, load, running, rate)
        wanted = rate * found.latency_s(load)
        if abs(wanted - running) < 1e-6 * running:
            return found
        running = (running + wanted) / 2
    raise Overloaded(f"{rate:g} requests a second of {load} are more than the engine can do")


def under_concurrency(model: IterationModel, load: Load, running: int) -> Steady:
    """With always so many requests running: a new one comes when one is done."""
    rate = 0.0
    for _ in range(ROUNDS):
        found = _state(model, load, running, rate)
        wanted = running / found.latency_s(load)
        if abs(wanted - rate) < 1e-9 * wanted:
            break
        rate = (rate + wanted) / 2
    return found


def _state(model: IterationModel, load: Load, running: float, rate: float) -> Steady:
    context = load.prompt_tokens + load.response_tokens / 2
    decodes = max(round(running), 1)
    plain = BatchWork(decodes, round(decodes * context))
    attended = load.prompt_tokens**2 / 2
    mixed = BatchWork(decodes, round(decodes * context), load.prompt_tokens, attended, 1)
    decode_s, prefill_s = model.seconds(plain), model.seconds(mixed) - model.seconds(plain)
    if rate * prefill_s >= 1:
        raise Overloaded(f"{rate:g} prompts a second take {prefill_s:.3f} s each")
    # a prompt waits for half of the iteration that is running, then is prefilled beside the decodes
    return Steady(running, decode_s / 2 + decode_s + prefill_s, decode_s / (1 - rate * prefill_s))
