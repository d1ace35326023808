import pytest

from infra.performance.distributions import constant
from tasks.simulation.rollart import breakdown


@pytest.fixture(scope="module")
def rows() -> dict[str, float]:
    return {f"{row.claim}: {row.condition}": row.ours for row in breakdown.rows(quick=True)}


@pytest.mark.slow
def test_the_parts_are_the_whole_step(rows: dict[str, float]) -> None:
    shares = [share for claim, share in rows.items() if claim.startswith("share") and "no env" in claim]
    assert len(shares) == len(breakdown.SHARES)
    assert sum(shares) == pytest.approx(1.0)


@pytest.mark.slow
def test_a_failed_reset_is_all_that_a_failed_step_is_longer_by(rows: dict[str, float]) -> None:
    longer = rows["step of SWE, s: environments fail"] - rows["step of SWE, s: no environment fails"]
    assert 0 < longer < 3 * breakdown.FAILED_RESET_S


def test_without_resets_steps_and_rewards_a_rollout_is_generation_alone() -> None:
    whole = breakdown.without_failures()
    assert whole.reset_s.tail is None
    idle = {"reset_s": constant(0), "step_s": constant(0), "reward_s": constant(0)}
    alone = breakdown.measure(whole.model_copy(update=idle), 2, 1)
    assert alone.stage_seconds["get_batch"] < breakdown.measure(whole, 2, 1).stage_seconds["get_batch"]
