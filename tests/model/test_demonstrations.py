import math
import re
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from tasks.campaign import Campaign
from tasks.environment.config import DomainConfig
from tasks.environment.rendering import ChatRenderer
from tasks.model.demonstrations import DemonstrationError, PlayedEpisode, play, render, seeds

VALID = {"lake": r"up|down|left|right", "guess": r"\\boxed\{([1-9]|10)\}", "sums": r"-?\d+"}


@pytest.mark.parametrize("domain", VALID)
def test_every_action_is_valid(episodes: dict[str, list[PlayedEpisode]], domain: str) -> None:
    actions = [action for episode in episodes[domain] for action in episode.actions]
    assert len(actions) >= 64
    assert all(re.fullmatch(VALID[domain], action) for action in actions)


def test_moves_are_drawn_uniformly(episodes: dict[str, list[PlayedEpisode]]) -> None:
    counts = Counter(action for episode in episodes["lake"] for action in episode.actions)
    total = sum(counts.values())
    assert len(counts) == 4
    for count in counts.values():  # within four standard deviations of a quarter
        assert abs(count - total / 4) < 4 * math.sqrt(total * 3 / 16)


def test_answers_are_not_chosen_for_being_right(episodes: dict[str, list[PlayedEpisode]]) -> None:
    right = 0
    for episode in episodes["sums"]:
        left, sign, other = re.search(r"(\d) ([+-]) (\d)", episode.observations[0]).groups()  # type: ignore[union-attr]
        right += int(episode.actions[0]) == int(left) + int(sign + other)
    assert right <= 16  # 64 answers, each right with a probability of about 1/20


def test_the_same_seed_plays_the_same_episode(campaign: Campaign) -> None:
    for name, domain in campaign.domains.items():
        assert play(name, domain, 11) == play(name, domain, 11)
        assert play(name, domain, 11) != play(name, domain, 12)


def test_an_episode_has_at_most_max_turns(campaign: Campaign) -> None:
    domain = campaign.domains["lake"].model_copy(update={"max_turns": 3})
    played = [play("lake", domain, seed) for seed in range(40)]
    assert max(len(episode.actions) for episode in played) == 3


def test_an_environment_that_samples_no_actions_only_shows_its_prompt() -> None:
    domain = DomainConfig(source="tests.bench.domains:Sums")
    episode = play("sums", domain, 4)
    assert len(episode.observations) == 1
    assert episode.actions == []


def test_a_dataset_without_one_right_answer_has_no_demonstrations() -> None:
    domain = DomainConfig(source="reasoning_gym", options={"dataset": "graph_color"})
    assert play("graphs", domain, 4).actions == []


class Broken:
    def reset(self, seed: int) -> str:
        raise RuntimeError("out of ice")

    def close(self) -> None:
        return None


def test_a_failing_environment_is_named() -> None:
    domain = DomainConfig(source="tests.model.test_demonstrations:Broken")
    with pytest.raises(DemonstrationError, match=r"domains\.ice.*seed 4.*RuntimeError: out of ice"):
        play("ice", domain, 4)


def test_seeds_are_never_held_out_ones(campaign: Campaign) -> None:
    first = list(islice(seeds(campaign, "lake"), 50))
    evaluation = campaign.evaluation.model_copy(update={"seed": first[7], "episodes": 1})
    held_out = campaign.model_copy(update={"evaluation": evaluation})
    assert list(islice(seeds(held_out, "lake"), 49)) == first[:7] + first[8:]


def test_domains_have_seeds_of_their_own(campaign: Campaign) -> None:
    assert set(islice(seeds(campaign, "lake"), 50)).isdisjoint(islice(seeds(campaign, "guess"), 50))


class TestRendering:
    def test_ids_are_those_of_the_whole_conversation(
        self,
        campaign: Campaign,
        episodes: dict[str, list[PlayedEpisode]],
        renderer: ChatRenderer,
        tokenizer: PreTrainedTokenizerFast,
    ) -> None:
        for name, domain in campaign.domains.items():
            for episode in episodes[name][:20]:
                demonstration = render(domain, episode, renderer, tokenizer)
                assert demonstration is not None
                messages = []
                for observation, action in zip(episode.observations, episode.actions, strict=False):
                    messages.append({"role": "user", "content": observation})
                    messages.append({"role": "assistant", "content": action})
                whole = tokenizer.apply_chat_template(messages, return_dict=False)
                assert demonstration.tokens.tolist() == whole

    def test_the_mask_is_on_actions_and_their_end_tokens(
        self,
        campaign: Campaign,
        episodes: dict[str, list[PlayedEpisode]],
        renderer: ChatRenderer,
        tokenizer: PreTrainedTokenizerFast,
    ) -> None:
        for name, domain in campaign.domains.items():
            for episode in episodes[name][:20]:
                demonstration = render(domain, episode, renderer, tokenizer)
                assert demonstration is not None
                trained = tokenizer.decode(demonstration.tokens[demonstration.loss_mask])
                assert trained == "".join(f"{action}<|eos|>" for action in episode.actions)
                ends = demonstration.tokens[np.array(demonstration.ends) - 1]
                assert set(ends.tolist()) == {tokenizer.eos_token_id}
                assert len(demonstration.tokens) == demonstration.ends[-1]

    def test_it_is_cut_before_a_response_that_does_not_fit(
        self, campaign: Campaign, renderer: ChatRenderer, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        episode = PlayedEpisode(["row 1", "row 2", "row 3"], ["up", "down", "left"])
        domain = campaign.domains["lake"]
        whole = render(domain, episode, renderer, tokenizer)
        assert whole is not None
        assert len(whole.ends) == 3
        tight = domain.model_copy(update={"max_tokens": whole.ends[2] - 1})
        shorter = render(tight, episode, renderer, tokenizer)
        assert shorter is not None
        assert shorter.tokens.tolist() == whole.first(2).tokens.tolist()
        assert shorter.ends == whole.ends[:2]
        one_token = domain.model_copy(update={"max_turn_tokens": 1})
        assert render(one_token, episode, renderer, tokenizer) is None
