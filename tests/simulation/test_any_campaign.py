"""What holds of every simulation, whatever campaign and workload."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tasks.report.run_files import RunFiles
from tasks.simulation.run import simulate
from tasks.train.modes import MODES
from tests.simulation.small import small_campaign, small_cluster


@st.composite
def trains(draw: st.DrawFn) -> dict[str, Any]:
    mode = MODES[draw(st.sampled_from(sorted(MODES)))]
    highest = 3 if mode.highest_alpha is None else mode.highest_alpha
    chosen: dict[str, Any] = {
        "mode": mode.name,
        "alpha": draw(st.integers(mode.lowest_alpha, highest)),
        "groups": draw(st.integers(1, 3)),
        "group_size": draw(st.integers(1, 3)),
        "steps": draw(st.integers(2, 4)),
    }
    if not mode.lockstep:
        chosen["redundancy"] = {"groups": draw(st.integers(0, 2)), "members": draw(st.integers(0, 2))}
    return chosen


@st.composite
def works(draw: st.DrawFn) -> dict[str, Any]:
    seconds = st.sampled_from([0, 0.05, 2.0, {"lognormal": {"median": 1.0, "sigma": 1.0}}])
    return {
        "prompt_tokens": draw(st.integers(1, 300)),
        "turns": {"uniform": {"low": 1, "high": draw(st.integers(1, 4))}},
        "response_tokens": {"lognormal": {"median": draw(st.integers(1, 200)), "sigma": 0.8}},
        "observation_tokens": draw(st.integers(1, 60)),
        "reset_s": draw(seconds),
        "step_s": draw(seconds),
        "reward_s": draw(seconds),
        "step_failure": draw(st.sampled_from([0.0, 0.05])),
    }


@settings(max_examples=10, deadline=None, derandomize=True, phases=[Phase.generate])
@given(train=trains(), work=works(), transport=st.sampled_from(["nccl", "store"]))
def test_steps_are_whole_and_nothing_is_trained_twice_or_too_old(
    train: dict[str, Any], work: dict[str, Any], transport: str
) -> None:
    cluster = small_cluster(workload={"math": work}, weights={"transport": transport})
    with TemporaryDirectory() as folder:
        result = simulate(small_campaign(**train), cluster, folder=Path(folder), warm_up_steps=0)
        ends = RunFiles(folder).read_ends()
    assert [row["step"] for row in result.rows] == list(range(train["steps"]))
    assert all(row["groups"] == train["groups"] for row in result.rows)
    times = [row["time"] for row in result.rows]
    assert times == sorted(times)
    if MODES[train["mode"]].bounds_staleness:
        assert len(result.staleness) <= train["alpha"] + 1
    names = [end["key"] for end in ends]
    assert len(set(names)) == len(names)
    trained = [end for end in ends if end["fate"] == "trained"]
    assert len(trained) == sum(row["trajectories"] for row in result.rows)
    assert all(0 <= share <= 1 + 1e-9 for share in result.utilisation.values())
