import json
import random
from pathlib import Path

import pytest
import yaml

from infra.hardware import hardware
from infra.models import model_of
from infra.performance.distributions import constant
from tasks.report.measures import batch_tokens
from tasks.simulation.calibration.cost_fits import Placed
from tasks.simulation.calibration.profile import Profile, group_share, profile_run, workload_of_run
from tasks.simulation.calibration.trace import TraceError
from tasks.simulation.cluster import ClusterConfig
from tasks.simulation.run import simulate
from tasks.trajectory import StopReason, Trajectory
from tests.simulation.calibration.runs import OBSERVATION, PROMPT, RESET_S, STEP_S, trajectory, write_run
from tests.simulation.small import cluster_data, small_campaign

SIZE = model_of("qwen3-0.6b")


def batch(step: int, members: int = 4) -> list[Trajectory]:
    return [
        trajectory(4 * step + group, member, response_tokens=20 + 10 * group, reward=float(member == 0))
        for group in range(4)
        for member in range(members)
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("profile") / "run", [batch(0), batch(1)], failed=4)


def test_a_runs_workload_is_what_its_trajectories_did(run: Path) -> None:
    workload = workload_of_run(run)["math"]
    assert workload.prompt_tokens == constant(PROMPT)
    assert workload.turns == constant(2)
    assert workload.observation_tokens == constant(OBSERVATION)
    assert workload.step_s == constant(STEP_S)
    assert workload.reset_s == constant(RESET_S)
    assert [workload.response_tokens.quantile(u) for u in (0.01, 0.99)] == [20, 50]
    assert workload.response_tokens.mean == pytest.approx(35, rel=0.01)
    assert workload.reset_failure == pytest.approx(4 / 20)
    assert workload.step_failure == 0
    assert workload.success == pytest.approx(0.25)
    assert workload.group_share == pytest.approx(1)


def test_a_turn_that_was_cut_would_have_been_longer(tmp_path: Path) -> None:
    cut = [trajectory(0, member, stop=StopReason.LENGTH) for member in range(4)]
    assert workload_of_run(write_run(tmp_path / "run", [cut]))["math"].response_tokens == constant(31)


def test_members_that_have_nothing_in_common_share_nothing() -> None:
    draw = random.Random(0)
    loose = [trajectory(g, m, response_tokens=draw.randint(10, 90)) for g in range(60) for m in range(6)]
    assert group_share(loose) < 0.1
    mixed = [
        trajectory(g, m, response_tokens=base + draw.randint(0, 40))
        for g in range(60)
        for base in [draw.randint(10, 50)]
        for m in range(6)
    ]
    assert group_share(mixed) == pytest.approx(0.5, abs=0.15)
    assert group_share([trajectory(0, 0)]) == 0


def test_a_profile_simulates_what_it_was_made_of(run: Path, tmp_path: Path) -> None:
    profile = profile_run(run, Placed(hardware("h20")), Placed(hardware("h800")), SIZE)
    profile.save(tmp_path)
    written = yaml.safe_load((tmp_path / "workload.yaml").read_text())
    pools = {
        "bandwidth": {"hardware": "h20", "devices": 1},
        "compute": {"hardware": "h800", "devices": 1},
        "cpus": {"hardware": "cpu", "devices": 1},
    }
    cluster = ClusterConfig.parse(
        {
            **cluster_data(
                pools=pools,
                model="qwen3-0.6b",
                rollout=[{"pool": "bandwidth", "devices": 1}],
                train={"pool": "compute", "devices": 1},
            ),
            **written,
        }
    )
    result = simulate(small_campaign(mode="sync_plus", alpha=0), cluster)
    tokens = sum(batch_tokens(row) for row in result.steps) / len(result.steps)
    recorded = sum(len(each.tokens) for each in batch(0))
    assert result.stage_seconds["train_step"] == pytest.approx(4 * tokens / recorded, rel=0.02)
    assert result.stage_seconds["publish"] == pytest.approx(0.5, rel=0.01)
    assert result.stage_seconds["pull"] == pytest.approx(0.2, rel=0.01)
    # Reset, and two turns of two seconds and a step each, most of them of one batch.
    assert result.stage_seconds["get_batch"] == pytest.approx(RESET_S + 2 * (2 + STEP_S), rel=0.35)


def test_coefficients_are_named_by_the_hardware_they_are_of(run: Path) -> None:
    apart: Profile = profile_run(run, Placed(hardware("h20")), Placed(hardware("h800")), SIZE)
    assert set(apart.calibration.hardware) == {"h20", "h800"}
    assert set(apart.calibration.of("h20").iteration) >= {"iteration_s"}
    assert apart.calibration.of("h20").training == {}
    together = profile_run(run, Placed(hardware("h800")), Placed(hardware("h800")), SIZE)
    assert set(together.calibration.of("h800").residuals) == {"turn", "train_step"}
    assert "2 train steps, 32 trajectories" in together.calibration.fitted_on


def test_a_step_without_its_trajectories_is_a_hole(run: Path, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [batch(0), batch(1), batch(2)])
    (folder / "samples/archive/step-00000001.parquet").unlink()
    with pytest.raises(TraceError, match=r"no trajectories of 1 of 3 steps \(1\)"):
        workload_of_run(folder)


def test_a_batch_of_which_ends_are_missing_is_a_hole(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [batch(0)])
    lines = (folder / "ends.jsonl").read_text().splitlines()
    (folder / "ends.jsonl").write_text("".join(f"{line}\n" for line in lines[3:]))
    assert json.loads(lines[0])["fate"] == "trained"
    with pytest.raises(TraceError, match="step 0 has 13 of 16"):
        workload_of_run(folder)
