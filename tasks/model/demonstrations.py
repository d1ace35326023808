"""What a small policy is warmed up on: real episodes with random valid actions.

They teach the form of an answer and nothing else: actions are drawn without a look at what they lead to.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from tasks.campaign import Campaign
from tasks.environment.config import DomainConfig
from tasks.environment.rendering import ChatRenderer
from tasks.environment.sources import make
from tasks.environment.sources.base import SamplesActions

EPISODES = 256
"""Episodes played of each domain."""


class DemonstrationError(RuntimeError):
    """An episode that could not be played or does not fit its budgets. The message names the option."""


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """`actions[i]` answers `observations[i]`; the last observation may be unanswered."""

    observations: list[str]
    actions: list[str]


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One episode as ids. `ends[i]` is one past the last id of response i; the ids end with the last one."""

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]  # True on responses, their end tokens included
    ends: list[int]

    def first(self, turns: int) -> "Demonstration":
        end = self.ends[:turns][-1]
        return Demonstration(self.tokens[:end], self.loss_mask[:end], self.ends[:turns])


def seeds(campaign: Campaign, domain: str) -> Iterator[int]:
    """Seeds of a domain's demonstrations, without end; never one that evaluation holds out."""
    held_out = range(campaign.evaluation.seed, campaign.evaluation.seed + campaign.evaluation.episodes)
    draw = Random(f"demonstrations {campaign.seed} {domain}")
    while True:
        seed = draw.getrandbits(30)
        if seed not in held_out:
            yield seed


def play(name: str, domain: DomainConfig, seed: int) -> PlayedEpisode:
    """One episode of the real environment, with random valid actions until it ends or has had `max_turns`.

    Only the first prompt when the environment cannot sample actions. Raises `DemonstrationError`.
    """
    draw = Random(f"actions {seed}")
    environment = make(domain.source, domain.options)
    try:
        episode = PlayedEpisode([environment.reset(seed)], [])
        while len(episode.actions) < domain.max_turns and isinstance(environment, SamplesActions):
            action = environment.sample_action(draw)
            if action is None:
                break
            episode.actions.append(action)
            result = environment.step(action)
            if result.terminated or result.truncated:
                break
            episode.observations.append(result.observation)
    except Exception as error:
        raise DemonstrationError(
            f"domains.{name}: the environment failed on seed {seed}: {type(error).__name__}: {error}"
        ) from error
    finally:
        environment.close()
    return episode


def render(
    domain: DomainConfig, episode: PlayedEpisode, renderer: ChatRenderer, tokenizer: PreTrainedTokenizerBase
) -> Demonstration | None:
    """The episode as rollout would have it, as if the policy had sampled its actions and an end token each.

    It is cut before the first response that `max_turn_tokens` or `max_tokens` does not hold; None when that
    is the first one, or when there are no actions.
    """
    parts: list[NDArray[np.int32]] = []
    ends: list[int] = []
    length = 0
    for turn, (observation, action) in enumerate(zip(episode.observations, episode.actions, strict=False)):
        asked = (
            renderer.observation(observation, ended=True)
            if turn
            else renderer.initial(observation, domain.system_prompt)
        )
        ids = tokenizer.encode(action, add_special_tokens=False)
        response = np.array([*ids, tokenizer.eos_token_id], np.int32)
        length += len(asked) + len(response)
        if len(response) > domain.max_turn_tokens or length > domain.max_tokens:
            break
        parts += [asked, response]
        ends.append(length)
    if not ends:
        return None
    loss_mask = np.concatenate([np.full(len(part), index % 2 == 1) for index, part in enumerate(parts)])
    return Demonstration(np.concatenate(parts), loss_mask, ends)
