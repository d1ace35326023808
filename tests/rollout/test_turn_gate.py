import pytest

from tasks.rollout.turn_gate import TurnGate, TurnRefused
from tasks.trajectory import StopReason


def refusal(gate: TurnGate, trajectory: str, version: int | None = 0) -> StopReason:
    with pytest.raises(TurnRefused) as refused:
        gate.check(trajectory, version)
    return refused.value.reason


def test_aborted_trajectories_are_refused_with_their_reason_until_finished() -> None:
    gate = TurnGate()
    gate.abort(["a", "b"], StopReason.CANCELLED)
    gate.abort(["c"], StopReason.STALE)
    assert refusal(gate, "a") is StopReason.CANCELLED
    assert refusal(gate, "c", None) is StopReason.STALE
    gate.finish(["a", "unknown"])
    gate.check("a", 0)
    assert gate.aborted == 2


def test_of_aborted_ones_that_never_finish_the_newest_are_remembered() -> None:
    gate = TurnGate(max_aborted=3)
    gate.abort([f"t{index}" for index in range(10)], StopReason.CANCELLED)
    assert gate.aborted == 3
    gate.check("t6", 0)
    assert refusal(gate, "t9") is StopReason.CANCELLED


def test_the_bound_holds_for_those_that_have_one() -> None:
    gate = TurnGate()
    gate.set_oldest_admissible(2)
    assert refusal(gate, "t", 1) is StopReason.STALE
    gate.check("t", 2)
    gate.check("evaluation", None)
