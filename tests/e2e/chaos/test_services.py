"""Each process of a run killed and frozen in its middle."""

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e.chaos.run import Attempt, ChaosRun, Outcome, chaos_run, freeze, kill

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Harm = Callable[[psutil.Process], None]
Record = Callable[[Outcome], None]
TWO_ENGINES = {"rollout": {"engine": {"workers": 2}, "heartbeat_limit_s": 10}}
HARMS = [pytest.param(kill, id="killed"), pytest.param(freeze, id="frozen")]


def endure(run: ChaosRun, name: str, module: str, harm: Harm) -> Outcome:
    return run.endure(f"{name} {harm.__name__}", lambda attempt: harm(attempt.running(module)[0]))


@pytest.mark.parametrize(
    "harm", [pytest.param(kill, id="killed"), pytest.param(freeze, id="frozen", marks=pytest.mark.chaos)]
)
def test_the_trainer_is_the_runs_one_error(model: Path, tmp_path: Path, harm: Harm, record: Record) -> None:
    outcome = endure(chaos_run(model, tmp_path), "trainer", "tasks.train.service", harm)
    record(outcome)
    assert outcome.error == "the trainer"


REPLACEABLE = {
    "LLM proxy": "tasks.rollout.proxy_service",
    "inference worker": "tasks.rollout.engines.service",
    "environment worker": "multiprocessing.spawn",
    "environment host": "tasks.environment.host",
    "reward worker": "tasks.reward.worker",
}


@pytest.mark.chaos
@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("part", REPLACEABLE)
def test_a_run_goes_on_without_a_part_that_is_replaced(
    model: Path, tmp_path: Path, part: str, harm: Harm, record: Record
) -> None:
    outcome = endure(chaos_run(model, tmp_path, **TWO_ENGINES), part, REPLACEABLE[part], harm)
    record(outcome)
    assert outcome.went_on


def test_a_run_outlives_the_harms_to_all_of_its_replaceable_parts(
    model: Path, tmp_path: Path, record: Record
) -> None:
    def harmed(module: str, harm: Harm) -> Callable[[Attempt], None]:
        return lambda attempt: harm(attempt.running(module)[0])

    harms = [
        (f"{part} {harm.__name__}", harmed(REPLACEABLE[part], harm))
        for part in reversed(REPLACEABLE)
        for harm in (kill, freeze)
    ]
    run = chaos_run(model, tmp_path, train={"steps": 2 * len(harms) + 4}, **TWO_ENGINES)
    for outcome in run.outlive(harms):
        record(outcome)


@pytest.mark.chaos
def test_a_killed_campaign_leaves_nothing_even_of_parts_that_were_frozen(
    model: Path, tmp_path: Path, record: Record
) -> None:
    def harm(attempt: Attempt) -> None:
        for module in ("tasks.train.service", "tasks.rollout.engines.service", "multiprocessing.spawn"):
            freeze(attempt.running(module)[0])
        attempt.process.kill()

    outcome = chaos_run(model, tmp_path).endure("campaign kill, its parts frozen", harm, killed=True)
    record(outcome)
    assert not outcome.went_on
