from typing import Any

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from tasks.environment.sources import make
from tasks.reward.functions import RewardInput
from tasks.reward.reasoning_gym import score
from tasks.trajectory import Skip

QUICK = [
    "chain_sum",
    "arc_1d",
    "number_sorting",
    "base_conversion",
    "family_relationships",
    "maze",
    "gcd",
    "leg_counting",
]


def judged(dataset: str, seed: int, answer: str, **config: Any) -> float | Skip:
    environment = make("reasoning_gym", {"dataset": dataset, **config})
    prompt = environment.reset(seed)
    result = environment.step(answer)
    return score(RewardInput("d", seed, prompt, (answer,), ("",), (0.0,), "terminated", result.info))


def gold(dataset: str, seed: int, **config: Any) -> str:
    return reasoning_gym.create_dataset(dataset, **config, seed=seed, size=1)[0]["answer"]


@pytest.mark.parametrize("dataset", QUICK)
def test_the_gold_answer_scores_one_with_and_without_tags(dataset):
    answer = gold(dataset, 5)
    assert judged(dataset, 5, answer) == 1.0
    assert judged(dataset, 5, f"so it is <answer>{answer}</answer>, I think") == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("dataset", sorted(set(DATASETS) - {"composite"}))
def test_every_dataset_scores_as_its_own_scorer_does(dataset):
    """Entries pass through JSON on their way to the scorer, which must not change a score."""
    own = reasoning_gym.create_dataset(dataset, seed=5, size=1)
    entry = own[0]
    assert judged(dataset, 5, str(entry["answer"])) == own.score_answer(str(entry["answer"]), entry)
    try:
        expected = own.score_answer("1", entry)
    except (ValueError, TypeError, KeyError):
        expected = 0.0
    assert judged(dataset, 5, "1") == expected


def test_a_wrong_answer_scores_by_the_datasets_own_rule():
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    answer = gold("chain_sum", 9, **options)
    assert judged("chain_sum", 9, str(int(answer) + 1), **options) == 0.0
    assert judged("chain_sum", 9, f"{answer} apples", **options) == len(answer) / len(f"{answer} apples")


def test_an_answer_that_the_scorer_cannot_parse_is_wrong():
    own = reasoning_gym.create_dataset("prime_factorization", seed=5, size=1)
    entry = own[0]
    with pytest.raises(ValueError, match="invalid literal"):
        own.score_answer("gibberish", entry)
    assert judged("prime_factorization", 5, "gibberish") == 0.0


def test_an_entry_that_the_scorer_cannot_use_is_a_fault():
    info = {"dataset": "prime_factorization", "config": "{}", "entry": '{"answer": "x"}', "answer": "2"}
    with pytest.raises(ValueError, match="invalid literal"):
        score(RewardInput("d", 1, "p", ("2",), ("",), (0.0,), "terminated", info))


def test_without_an_answer_there_is_nothing_to_judge():
    assert isinstance(score(RewardInput("d", 1, "p", (), (), (), "max_tokens", {})), Skip)
