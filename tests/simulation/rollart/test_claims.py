import json
from pathlib import Path

import pytest

from tasks.simulation.rollart.claims import Given, Row, extremes, read, rests_on, table, write

TURNS = Given("30 turns", "published", "Table 1")
SIGMA = Given("sigma 0.5", "inferred", "production's longest")


def row(published: float, ours: float, **more: str) -> Row:
    return Row("a over b", "8B", published, ours, rests_on(TURNS), **more)  # type: ignore[arg-type]


def test_deviation_is_relative_to_what_was_published() -> None:
    assert row(2.0, 2.1).deviation == pytest.approx(0.05)
    assert row(2.0, 1.5).deviation == pytest.approx(-0.25)
    assert row(2.0, 2.19).met
    assert not row(2.0, 2.21).met


def test_a_bound_that_holds_does_not_deviate() -> None:
    assert row(0.53, 0.9, relation="at least").deviation == 0
    assert row(0.50, 0.4, relation="at least").deviation == pytest.approx(-0.2)
    assert row(0.62, 0.3, relation="at most").deviation == 0
    assert row(0.50, 0.6, relation="at most").deviation == pytest.approx(0.2)


def test_inputs_are_listed_once_under_their_basis() -> None:
    found = rests_on(TURNS, [SIGMA, TURNS])
    assert found == {
        "published": ["30 turns [Table 1]"],
        "inferred": ["sigma 0.5 [production's longest]"],
        "fitted": [],
    }


def test_a_published_range_is_judged_at_both_ends() -> None:
    rows = extremes("x", "all", (1.4, 2.4), {"8B": 1.5, "14B": 2.6, "32B": 1.9}, rests_on())
    assert [(each.claim, each.published, each.ours) for each in rows] == [
        ("x, lowest", 1.4, 1.5),
        ("x, highest", 2.4, 2.6),
    ]
    assert "14B 2.60" in rows[0].note


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    rows = [row(2.0, 1.5, note="because"), row(0.5, 0.6, relation="at least")]
    path = tmp_path / "runs/reproduce.json"
    write(rows, path)
    assert read(path) == rows
    plain = json.loads(path.read_text())["rows"][0]
    assert plain["deviation"] == pytest.approx(-0.25)
    assert plain["met"] is False
    assert plain["rests_on"]["published"] == ["30 turns [Table 1]"]


def test_the_table_marks_what_misses_and_gives_its_reason() -> None:
    shown = table([row(2.0, 2.1), row(2.0, 1.0, note="the reason")])
    lines = shown.splitlines()
    assert "+5.0%" in lines[1]
    assert "*" not in lines[1]
    assert "-50.0%  *" in lines[2]
    assert "the reason" in lines[3]
    assert lines[-1].startswith("1 of 2 within 10%")


def test_a_note_that_rows_share_is_shown_once() -> None:
    shown = table([row(2.0, 1.0, note="the reason"), row(3.0, 1.0, note="the reason")])
    assert shown.count("the reason") == 1
