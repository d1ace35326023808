"""The policy that a campaign starts from, in the real environments: it keeps to the format and explores."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tasks.campaign import Campaign
from tasks.environment.rendering import ChatRenderer
from tasks.environment.sources import make
from tasks.model.demonstrations import PlayedEpisode
from tasks.model.prepare import prepare

pytestmark = pytest.mark.slow

VALID = {"lake": r"up|down|left|right", "guess": r"\\boxed\{\d+\}", "sums": r"-?\d+"}
UNSEEN_SEEDS = range(1_500_000_000, 1_500_000_060)


class Policy:
    """The saved model, one forward pass a token."""

    def __init__(self, directory: Path):
        self.model = AutoModelForCausalLM.from_pretrained(directory)
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.renderer = ChatRenderer(directory)
        self.end = self.tokenizer.eos_token_id
        self.draws = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def next_token(self, context: list[int]) -> torch.Tensor:
        logits: torch.Tensor = self.model(torch.tensor([context])).logits[0, -1]
        return logits.double().softmax(-1)

    def respond(self, context: list[int], budget: int) -> list[int]:
        response: list[int] = []
        while len(response) < budget and self.end not in response:
            probabilities = self.next_token(context + response)
            response.append(int(torch.multinomial(probabilities, 1, generator=self.draws)))
        return response

    def probability(self, context: list[int], action: str) -> float:
        probability = 1.0
        for token in [*self.tokenizer.encode(action), self.end]:
            probability *= float(self.next_token(context)[token])
            context = [*context, token]
        return probability

    def entropy(self, context: list[int], actions: list[str]) -> float:
        """Nats, of the policy restricted to these actions."""
        probabilities = [self.probability(context, action) for action in actions]
        total = sum(probabilities)
        return -sum(value / total * math.log(value / total) for value in probabilities)


@pytest.fixture(scope="module")
def policy(campaign: Campaign, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policy]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("warm") / "model"
    prepare(campaign, directory, lambda: 0.0)
    yield Policy(directory)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("domain", VALID)
def test_at_least_95_percent_of_its_actions_are_valid_in_every_turn(
    policy: Policy, campaign: Campaign, domain: str
) -> None:
    config = campaign.domains[domain]
    responses: list[tuple[int, str, bool]] = []
    for seed in UNSEEN_SEEDS:
        environment = make(config.source, config.options)
        context = policy.renderer.initial(environment.reset(seed)).tolist()
        for turn in range(config.max_turns):
            response = policy.respond(context, config.max_turn_tokens)
            ended = response[-1] == policy.end
            action = policy.tokenizer.decode(response, skip_special_tokens=True)
            responses.append((turn, action, ended and re.fullmatch(VALID[domain], action) is not None))
            result = environment.step(action)
            if result.terminated or result.truncated:
                break
            context += response + policy.renderer.observation(result.observation, ended).tolist()
        environment.close()
    assert sum(valid for *_, valid in responses) >= 0.95 * len(responses)
    later = [valid for turn, _, valid in responses if turn >= min(config.max_turns - 1, 8)]
    assert later
    assert sum(later) >= 0.9 * len(later)


def lake_context(policy: Policy, turns: int) -> list[int]:
    """`turns` moves into the upper wall."""
    first = "Go from S to G, not into H. Say up, down, left or right.\nSFFF\nFHFH\nFFFH\nHFFG\nrow 1 column 1"
    context = policy.renderer.initial(first).tolist()
    for _ in range(turns):
        context += [*policy.tokenizer.encode("up"), policy.end]
        context += policy.renderer.observation("row 1 column 1", True).tolist()
    return context


@pytest.mark.parametrize("turns", [0, 2, 14])
def test_its_moves_are_nearly_uniform(policy: Policy, turns: int) -> None:
    moves = ["up", "down", "left", "right"]
    assert policy.entropy(lake_context(policy, turns), moves) > 0.95 * math.log(4)


def test_its_guesses_are_nearly_uniform(policy: Policy, episodes: dict[str, list[PlayedEpisode]]) -> None:
    guesses = [f"\\boxed{{{number}}}" for number in range(1, 11)]
    context = policy.renderer.initial(episodes["guess"][0].observations[0]).tolist()
    assert policy.entropy(context, guesses) > 0.95 * math.log(10)


def test_its_sums_are_as_spread_as_the_answers_to_random_questions(
    policy: Policy, episodes: dict[str, list[PlayedEpisode]]
) -> None:
    context = policy.renderer.initial(episodes["sums"][0].observations[0]).tolist()
    exact: Counter[int] = Counter()
    for left in range(10):
        for right in range(10):
            exact.update([left + right, left - right])
    expected = -sum(count / 200 * math.log(count / 200) for count in exact.values())
    # Not 0.95 as elsewhere: the warm-up sees each question some ten times, and leans a little on them.
    assert policy.entropy(context, [str(number) for number in range(-9, 19)]) > 0.85 * expected
