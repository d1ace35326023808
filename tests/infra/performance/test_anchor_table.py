import pytest

from infra.performance.anchor_table import Anchor, summary, table


def test_a_row_says_its_deviation():
    row = Anchor("g", "c", "s", 2.0, 3.0, "nothing", "loud")
    assert row.deviation == pytest.approx(0.5)
    assert "| g | c | s | 2 | 3 | +50.0% | nothing | loud |" in table([row])
    assert "not modelled" in table([Anchor("g", "c", "s", 2.0, None)])


def test_the_summary_counts_what_is_predicted():
    rows = [Anchor("g", "c", "s", 2.0, predicted) for predicted in (2.2, 1.6, 2.0, None)]
    assert "| g | 3 | 10.0% | 20.0% |" in summary([*rows, Anchor("h", "c", "s", 2.0, None)])
