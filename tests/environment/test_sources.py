import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.environment.sources import SourceError, make
from tasks.environment.sources.reasoning_gym import tag, untag

LAKE = {"id": "FrozenLake-v1", "is_slippery": False}
GUESS = {"id": "game:GuessTheNumber-v0-easy"}
SUM = {"dataset": "chain_sum", "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def play(source: str, options: dict[str, Any], seed: int, actions: list[str]) -> list[Any]:
    environment = make(source, options)
    seen: list[Any] = [environment.reset(seed)]
    for action in actions:
        result = environment.step(action)
        seen.append((result.observation, result.reward, result.terminated, result.truncated))
        if result.terminated or result.truncated:
            break
    environment.close()
    return seen


def test_frozen_lake_shows_the_map_once_and_then_positions():
    seen = play("gymnasium", LAKE, 0, ["right", "I say: Down!", "left or rather RIGHT."])
    assert seen[0].endswith("SFFF\nFHFH\nFFFH\nHFFG\nrow 1 column 1")
    assert seen[1] == ("row 1 column 2", 0.0, False, False)
    assert seen[2] == ("row 2 column 2", 0.0, True, False)  # a hole


def test_frozen_lake_rewards_the_goal():
    path = ["down", "down", "right", "right", "down", "right"]
    assert play("gymnasium", LAKE, 0, path)[-1] == ("row 4 column 4", 1.0, True, False)


def test_of_several_words_the_last_valid_one_counts_and_parts_of_words_do_not():
    assert play("gymnasium", LAKE, 0, ["up up down, upright"])[1][0] == "row 2 column 1"


def test_an_invalid_action_stays_and_costs_what_the_option_says():
    assert play("gymnasium", LAKE, 0, ["jump"])[1] == ("invalid, row 1 column 1", 0.0, False, False)
    costly = play("gymnasium", {**LAKE, "invalid_reward": -0.25}, 0, ["", "right"])
    assert costly[1][1] == -0.25
    assert costly[2][:2] == ("row 1 column 2", 0.0)


def test_max_steps_truncates_and_invalid_actions_count():
    seen = play("gymnasium", {**LAKE, "max_steps": 3}, 0, ["up", "?", "up", "up"])
    assert [step[2:] for step in seen[1:]] == [(False, False), (False, False), (False, True)]


def test_reaching_the_goal_in_the_last_step_is_no_truncation():
    path = ["down", "down", "right", "right", "down", "right"]
    assert play("gymnasium", {**LAKE, "max_steps": 6}, 0, path)[-1][2:] == (True, False)


def test_gymnasiums_own_limit_holds_without_max_steps():
    assert play("gymnasium", LAKE, 0, ["up"] * 200)[-1][2:] == (False, True)
    assert len(play("gymnasium", LAKE, 0, ["up"] * 200)) == 101


def test_a_map_of_ones_own():
    assert "SG" in play("gymnasium", {**LAKE, "desc": ["SG", "FF"]}, 0, [])[0]


def test_a_random_map_is_the_seeds():
    options = {**LAKE, "random_map": 6}
    maps = [play("gymnasium", options, seed, [])[0] for seed in (1, 1, 2)]
    assert maps[0] == maps[1] != maps[2]
    assert len(maps[0].splitlines()) == 1 + 6 + 1


def test_other_toy_texts_have_adapters():
    assert play("gymnasium", {"id": "CliffWalking-v1"}, 0, ["up"])[1] == (
        "row 3 column 1",
        -1.0,
        False,
        False,
    )
    assert play("gymnasium", {"id": "Blackjack-v1"}, 3, ["stick"])[1][2] is True


@pytest.mark.parametrize(
    ("source", "options", "actions"),
    [
        ("gymnasium", {"id": "FrozenLake-v1", "is_slippery": True}, ["right", "down"] * 20),
        ("gymnasium", {"id": "Blackjack-v1"}, ["hit", "stick"]),
        ("gem", {"id": "game:Game2048-v0-easy"}, ["\\boxed{left}", "\\boxed{up}"] * 3),
        ("gem", GUESS, ["\\boxed{5}", "\\boxed{2}"]),
        ("gem", {"id": "game:Minesweeper-v0-easy"}, ["\\boxed{reveal 1 1}"]),
        ("reasoning_gym", SUM, ["3"]),
    ],
)
def test_the_same_seed_is_the_same_episode_whatever_else_runs(source, options, actions):
    alone = play(source, options, 11, actions)
    others = [play(source, options, seed, actions) for seed in range(6)]
    assert any(other != alone for other in others)
    random.seed(99)
    np.random.seed(99)
    with ThreadPoolExecutor(8) as pool:
        together = list(
            pool.map(lambda seed: play(source, options, seed, actions), [11, 0, 11, 1, 2, 11] * 4)
        )
    assert together == [alone, others[0], alone, others[1], others[2], alone] * 4


def test_gem_passes_its_own_texts_with_their_suffix():
    seen = play("gem", GUESS, 1, ["\\boxed{1}"])
    assert seen[0].startswith("You are playing Guess The Number.\n")
    assert seen[0].endswith("to start the game.\nEnter your next guess.")
    assert (
        seen[1][0]
        == "At turn 1, you guessed 1, and the target number is higher than 1.\nEnter your next guess."
    )


def test_reasoning_gym_asks_one_question_and_keeps_what_its_scorer_needs():
    environment = make("reasoning_gym", SUM)
    question = environment.reset(3)
    result = environment.step("I think <answer> 12 </answer> or so")
    entry = untag(json.loads(result.info["entry"]))
    assert entry["question"] == question
    assert result.info["answer"] == "12"
    assert (result.reward, result.terminated) == (0.0, True)
    assert environment.step("  -4\n").info["answer"] == "-4"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.tuples(inner, inner)
            | st.dictionaries(st.text(), inner)
            | st.dictionaries(st.integers(), inner)
        ),
        max_leaves=12,
    )
)
def test_an_entry_comes_back_from_json_as_it_was(value):
    assert untag(json.loads(json.dumps(tag(value)))) == value


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ("nope", {}, "reasoning_gym"),
        ("absent.module:Class", {}, "absent"),
        ("tests.environment.misbehaving:Absent", {}, "Absent"),
        ("gymnasium", {"id": "Taxi-v3"}, "FrozenLake-v1"),
        ("gymnasium", {**LAKE, "slippery": 1}, "slippery"),
        ("gymnasium", {"id": "Blackjack-v1", "random_map": 4}, "random_map"),
        ("gem", {"id": "game:Absent"}, "game:Absent"),
        ("reasoning_gym", {"dataset": "absent"}, "absent"),
        ("reasoning_gym", {**SUM, "terms": 3}, "terms"),
        ("reasoning_gym", {**SUM, "seed": 3}, "seed"),
    ],
)
def test_what_cannot_be_made_is_named(source, options, said):
    with pytest.raises(SourceError, match=said):
        make(source, options)
