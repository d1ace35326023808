"""What a user can ask, and the one clear error that bad input gets."""

import asyncio

import pytest
from pydantic import ValidationError

from tasks.simulation.cluster import ClusterError
from tasks.simulation.what_if.answer import Answer, format_table
from tasks.simulation.what_if.candidates import VaryError
from tasks.simulation.what_if.predict import predict, warm_up_steps
from tasks.simulation.what_if.prediction import Prediction
from tasks.simulation.what_if.question import Question, WhatIf
from tasks.simulation.what_if.search import Search
from tasks.simulation.what_if.simulations import Simulations, outcome
from tests.simulation.small import small_campaign, small_cluster


def question(*vary: str, **limits: float) -> Question:
    return Question(small_campaign(), small_cluster(), WhatIf(vary=vary, steps=1, **limits))


def problems(asked: Question) -> dict[str, str | None]:
    return {asked.space.label(point): asked.problem(point) for point in asked.space.points()}


def test_candidates_are_the_two_files_with_their_options_changed():
    asked = question("train.alpha=1,2", "cluster.rollout.0.devices=2,4")
    campaign, cluster = asked.candidate((1, 1))
    assert campaign.train.alpha == 2
    assert cluster.rollout[0].devices == 4
    assert cluster.pools["gpus"].devices == 6
    assert cluster.usd_per_hour > small_cluster().usd_per_hour


def test_what_cannot_run_is_turned_down_with_its_numbers_and_nothing_is_simulated():
    asked = question("cluster.model=qwen3-1.7b,llama-3.1-70b", "train.groups=4,0")
    found = problems(asked)
    assert found["model=qwen3-1.7b, groups=4"] is None
    assert "train.groups" in (found["model=qwen3-1.7b, groups=0"] or "")
    too_large = found["model=llama-3.1-70b, groups=4"] or ""
    assert "rollout.0" in too_large
    assert any(letter.isdigit() for letter in too_large.replace("rollout.0", ""))


def test_a_mode_that_overlaps_needs_devices_of_its_own():
    cluster = small_cluster(
        pools={"gpus": {"hardware": "h100", "devices": 2}, "cpus": {"hardware": "cpu", "devices": 1}},
        train={"pool": "gpus", "devices": 2, "colocated": True},
    )
    asked = Question(small_campaign(), cluster, WhatIf(vary=("train.mode=sync_plus,tutti",), steps=1))
    found = problems(asked)
    assert found["mode=sync_plus"] is None
    assert "mode tutti" in (found["mode=tutti"] or "")
    assert "2 devices" in (found["mode=tutti"] or "")


def test_a_domain_without_a_workload_is_named():
    cluster = small_cluster(workload={"web": {"prompt_tokens": 10, "response_tokens": 10}})
    found = Question(small_campaign(), cluster, WhatIf()).problem(())
    assert found is not None
    assert "math" in found
    assert "web" in found


def test_rent_over_the_budget_is_known_before_simulating():
    rent = small_cluster().usd_per_hour
    asked = question("cluster.rollout.0.devices=2,8", usd_per_hour=rent + 0.01)
    found = problems(asked)
    assert found["rollout.0.devices=2"] is None
    assert f"over the budget of {rent + 0.01:g}" in (found["rollout.0.devices=8"] or "")


def test_what_no_candidate_can_have_is_one_error():
    with pytest.raises(VaryError, match="list of 1"):
        question("cluster.rollout.3.devices=1,2").search()
    with pytest.raises(ValidationError, match="option=value"):
        WhatIf(vary=("train.alpha",))


def test_simulations_of_candidates_are_told_apart_and_repeat_exactly():
    asked = question("cluster.rollout.0.max_running=1,64")
    first, second = (predict(*asked.candidate(point), steps=2) for point in asked.space.points())
    assert first.step_seconds > second.step_seconds
    again = predict(*asked.candidate((0,)), steps=2)
    assert again.model_dump(exclude={"wall_seconds"}) == first.model_dump(exclude={"wall_seconds"})
    assert first.usd_per_step == pytest.approx(first.usd_per_hour * first.step_seconds / 3600)
    assert first.steps == 2


def test_the_campaigns_own_number_of_steps_does_not_matter():
    one, many = (predict(small_campaign(steps=steps), small_cluster(), steps=2) for steps in (1, 1000))
    assert one.step_seconds == many.step_seconds


async def test_a_simulation_runs_beside_an_event_loop():
    campaign, cluster = small_campaign(), small_cluster()
    with Simulations(1) as here:
        found = await asyncio.gather(*(here.run(campaign, cluster, 1) for _ in range(2)))
    one, other = found
    assert isinstance(one, Prediction)
    assert isinstance(other, Prediction)
    assert one.step_seconds == other.step_seconds


def test_a_candidate_that_cannot_be_simulated_has_its_reason_as_outcome():
    found = outcome(small_campaign(), small_cluster(model="llama-3.1-70b"), 1)
    assert isinstance(found, str)
    assert "rollout.0" in found
    with pytest.raises(ClusterError):
        predict(small_campaign(), small_cluster(model="llama-3.1-70b"))


def test_an_answer_lists_every_candidate_the_best_first():
    asked = question("cluster.rollout.0.devices=2,8", "train.groups=4,0", usd_per_hour=20)
    search: Search = asked.search()
    while points := search.ask():
        for point in points:
            search.tell(point, outcome(*asked.candidate(point), 1))
    answer = Answer.of(search, "small", "few")
    assert [candidate.label for candidate in answer.simulated] == ["rollout.0.devices=2, groups=4"]
    assert answer.best is answer.candidates[0]
    assert len(answer.candidates) == answer.size == 4
    assert sum(answer.rejections.values()) == 3
    lines = format_table(answer.candidates).splitlines()
    assert lines[1].split()[-1] == "best"
    plain = answer.plain()
    assert plain["limits"]["usd_per_hour"] == 20
    assert [each["prediction"] is not None for each in plain["candidates"]] == [True, False, False, False]


def test_the_steps_in_which_the_first_batches_arrive_at_once_are_left_out():
    assert warm_up_steps(small_campaign(alpha=2)) == 3
    assert warm_up_steps(small_campaign(mode="sync_plus", alpha=0)) == 1
    found = predict(small_campaign(alpha=2), small_cluster(), steps=1)
    assert found.steps == 1
    longer = predict(small_campaign(alpha=2), small_cluster(), steps=4, warm_up=0)
    assert longer.steps == 4
    assert longer.virtual_seconds == pytest.approx(found.virtual_seconds)
