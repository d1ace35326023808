"""How well a policy keeps to a domain's answer format, and how freely it explores within it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tasks.model.demonstrations import Demonstration

_LATEST_TURN = 4


@dataclass(frozen=True, slots=True)
class AnswerForm:
    valid_share: float  # of sampled responses: ended in time, in the form of a random valid action
    entropy: float  # nats a response; estimated from the samples' log-probabilities


def form(answer: str) -> str:
    """What makes two answers alike in form: all but the values of their numbers."""
    return re.sub(r"[0-9]+", "0", answer)


@torch.no_grad()
def measure_answer_form(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    demonstrations: Sequence[Demonstration],
    valid_actions: Sequence[str],
    max_turn_tokens: int,
    seed: int,
    samples: int = 128,
) -> AnswerForm:
    """Sample responses at temperature 1 in the contexts of random turns, up to the fourth, of demonstrations.

    The caller's random state is left as it was.
    """
    draw = Random(f"answer form {seed}")
    contexts = [_context(draw.choice(demonstrations), draw) for _ in range(samples)]
    batch = tokenizer.pad({"input_ids": contexts}, padding_side="left", return_tensors="pt")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        generated: Any = model.generate(  # type: ignore[operator]
            **batch,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max_turn_tokens,
            return_dict_in_generate=True,
            output_logits=True,
        )
    responses_BT = generated.sequences[:, batch["input_ids"].shape[1] :]
    logprobs_BTV = torch.stack(generated.logits, 1).float().log_softmax(-1)
    logprobs_BT = logprobs_BTV.gather(-1, responses_BT[..., None]).squeeze(-1)
    is_end_BT = responses_BT == tokenizer.eos_token_id
    sampled_BT = is_end_BT.cumsum(1) - is_end_BT.long() == 0  # up to the first end token, itself included
    forms = {form(action) for action in valid_actions}
    valid = 0
    for response_T, sampled_T, ended in zip(responses_BT, sampled_BT, is_end_BT.any(1), strict=True):
        text = str(tokenizer.decode(response_T[sampled_T][:-1].tolist()))
        valid += bool(ended) and form(text) in forms
    return AnswerForm(valid / samples, -float((logprobs_BT * sampled_BT).sum(1).mean()))


def _context(demonstration: Demonstration, draw: Random) -> list[int]:
    """What stands before the response of a random turn."""
    turn = draw.randrange(min(len(demonstration.ends), _LATEST_TURN))
    shown = demonstration.first(turn + 1)
    start = int((~shown.loss_mask).nonzero()[0][-1]) + 1
    ids: list[int] = shown.tokens[:start].tolist()
    return ids
