import statistics
from typing import Any

import numpy as np
import pytest

from tasks.environment.episode import turn_seed
from tasks.rollout.engines.base import GenerateRequest
from tasks.simulation.workload import DomainWorkload, Workload, WorkloadError, key_of
from tasks.trajectory import TrajectoryKey


def domain(**changes: Any) -> DomainWorkload:
    return DomainWorkload.model_validate(
        {
            "prompt_tokens": {"lognormal": {"median": 500, "sigma": 0.4}},
            "turns": {"uniform": {"low": 1, "high": 20}},
            "response_tokens": {"lognormal": {"median": 300, "sigma": 0.6}},
            "observation_tokens": {"uniform": {"low": 10, "high": 100}},
            "step_s": {"normal": {"mean": 10, "std": 3}},
            **changes,
        }
    )


def workload(seed: int = 1, **changes: Any) -> Workload:
    return Workload({"d": domain(**changes)}, ["d"], seed)


def request(group: int, member: int, turn: int = 0) -> GenerateRequest:
    key = TrajectoryKey(group, member)
    seed = turn_seed(1000 * group + member, turn)
    return GenerateRequest(str(key), np.zeros(4, np.int32), 64, 1.0, seed)


def test_every_answer_is_the_same_each_time_and_in_any_order() -> None:
    one, other = workload(), workload()
    keys = [TrajectoryKey(group, member) for group in range(5) for member in range(3)]
    asked = {key: (one.turns(key), one.step_s(key, 2), one.prompt_tokens(key.group)) for key in keys}
    for key in reversed(keys):
        assert (other.turns(key), other.step_s(key, 2), other.prompt_tokens(key.group)) == asked[key]


def test_another_seed_gives_other_work() -> None:
    keys = [TrajectoryKey(group, 0) for group in range(20)]
    assert [workload(1).turns(key) for key in keys] != [workload(2).turns(key) for key in keys]


def test_a_group_is_of_the_domain_of_its_number() -> None:
    both = Workload(
        {"short": domain(response_tokens=3), "long": domain(response_tokens=900)}, ["long", "short"], 0
    )
    assert both.response_tokens(request(4, 0)) == 900
    assert both.response_tokens(request(5, 0)) == 3


def test_members_of_a_group_share_their_prompt_and_nobody_elses() -> None:
    work = workload()
    named = {work.prompt_of(request(group, member)) for group in range(6) for member in range(4)}
    assert len(named) == 6
    assert work.prompt_of(request(2, 3)) == ("g2", work.prompt_tokens(2))


def test_draws_follow_their_distribution() -> None:
    work = workload(group_share=0.5)
    turns = [work.turns(TrajectoryKey(group, member)) for group in range(800) for member in range(2)]
    assert statistics.mean(turns) == pytest.approx(10.5, abs=0.8)
    assert set(turns) == set(range(1, 21))
    lengths = [work.response_tokens(request(group, 0)) for group in range(1500)]
    assert statistics.median(lengths) == pytest.approx(300, rel=0.1)


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0.0), (0.6, 0.6), (1.0, 1.0)])
def test_siblings_have_their_share_of_the_variance_in_common(share: float, expected: float) -> None:
    work = workload(group_share=share)
    lengths = [[np.log(work.response_tokens(request(g, m))) for g in range(1500)] for m in (0, 1)]
    assert statistics.correlation(*lengths) == pytest.approx(expected, abs=0.08)


def test_an_interrupted_turn_goes_on_to_the_length_it_had() -> None:
    work = workload()
    begun = request(3, 1)
    goes_on = GenerateRequest(begun.session, np.zeros(50, np.int32), 18, 1.0, begun.seed, sampled_before=46)
    assert work.response_tokens(goes_on) == work.response_tokens(begun)
    assert work.response_tokens(request(3, 1, turn=1)) != work.response_tokens(begun)


def test_faults_and_successes_come_at_their_rates() -> None:
    work = workload(reset_failure=0.1, step_failure=0.02, success=0.3)
    keys = [TrajectoryKey(group, member) for group in range(1000) for member in range(2)]
    assert sum(map(work.reset_fails, keys)) / len(keys) == pytest.approx(0.1, abs=0.025)
    assert sum(work.step_fails(key, 4) for key in keys) / len(keys) == pytest.approx(0.02, abs=0.012)
    assert sum(map(work.succeeds, keys)) / len(keys) == pytest.approx(0.3, abs=0.04)
    assert not any(map(workload().reset_fails, keys))


def test_a_new_attempt_draws_anew() -> None:
    work = workload(reset_failure=0.5)
    attempts = [
        [work.reset_fails(TrajectoryKey(group, 0, attempt)) for group in range(40)] for attempt in (0, 1)
    ]
    assert attempts[0] != attempts[1]


def test_a_domain_of_the_campaign_without_workload_is_an_error() -> None:
    with pytest.raises(WorkloadError, match="no domain swe, which the campaign trains on: it has d"):
        Workload({"d": domain()}, ["d", "swe"], 0)


def test_a_session_with_a_prefix_is_its_trajectory() -> None:
    assert key_of(f"pg-7-{TrajectoryKey(3, 1, 2)}") == TrajectoryKey(3, 1, 2)
