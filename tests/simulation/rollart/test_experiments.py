"""The experiments that this file's owners wrote, in their quick form: every row rests on something."""

import pytest

from tasks.simulation.rollart import modes, redundancy, scaling, staleness
from tasks.simulation.rollart.claims import Row
from tasks.simulation.rollart.modes import NAMES, QUICK, step_seconds


@pytest.fixture(scope="module")
def seconds() -> dict[str, float]:
    return step_seconds("8B", QUICK["8B"])


def test_each_step_that_the_paper_takes_beyond_sync_is_faster(seconds: dict[str, float]) -> None:
    assert seconds["Sync"] > 1.4 * seconds["Sync+"]
    assert seconds["Sync+"] > 1.05 * seconds["One-off"]
    assert seconds["Sync"] > 1.4 * seconds["RollArt"]
    assert list(seconds) == [NAMES[mode] for mode in modes.MODES]


def test_rows_of_the_modes_are_ratios_of_their_step_times(
    seconds: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modes, "step_seconds", lambda model, length: seconds)
    rows = {row.claim: row for row in modes.rows(quick=True)}
    assert rows["Sync+ over Sync, lowest"].ours == pytest.approx(seconds["Sync"] / seconds["Sync+"])
    assert rows["RollArt over Sync, highest"].published == 4.58
    _rest_on_something(list(rows.values()))


def test_redundancy_shortens_the_rollout() -> None:
    rows = redundancy.rows(quick=True)
    assert [row.published for row in rows] == [1.62]
    assert rows[0].ours > 1.2
    _rest_on_something(rows)


def test_the_sweeps_compare_with_alpha_1_and_with_every_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their runs are those of the modes; here only what is made of the step times."""
    monkeypatch.setattr(
        staleness, "sweep", lambda model, alphas, length: dict(zip(alphas, (120.0, 100.0), strict=True))
    )
    (row,) = staleness.rows(quick=True)
    assert row.ours == pytest.approx(1.2)
    taken = {"sync_plus": 200.0, "one_off": 150.0, "areal": 140.0, "tutti": 100.0}
    monkeypatch.setattr(scaling, "step_seconds", lambda model, gpus, mode, length: taken[mode])
    lowest, highest = scaling.rows(quick=True)
    assert (lowest.ours, highest.ours) == (pytest.approx(1.4), pytest.approx(2.0))
    _rest_on_something([row, lowest, highest])


def _rest_on_something(rows: list[Row]) -> None:
    for row in rows:
        assert row.rests_on["published"]
        assert row.rests_on["inferred"]
