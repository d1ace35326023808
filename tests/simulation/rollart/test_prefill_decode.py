from tasks.simulation.rollart import prefill_decode


def test_ratios_are_of_the_seconds_in_the_same_table() -> None:
    found: dict[tuple[str, str], tuple[float, float | None]] = {
        ("32B", "1P3D"): (100.0, 110.0),
        ("32B", "2P2D"): (90.0, 99.0),
        ("32B", "3P1D"): (150.0, None),
    }
    rows = {(row.claim, row.condition): row for row in prefill_decode.table_rows(found)}
    ratio = rows["colocated over PD, rollout time", "32B, 1P3D"]
    assert ratio.ours == 1.1
    assert round(ratio.published, 2) == 1.03
    (slowest,) = (row for (claim, _), row in rows.items() if claim.startswith("3P1D"))
    assert (slowest.ours, slowest.met) == (1.5, True)


def test_a_faster_3p1d_is_a_miss() -> None:
    found: dict[tuple[str, str], tuple[float, float | None]] = {
        ("32B", "1P3D"): (100.0, 110.0),
        ("32B", "3P1D"): (80.0, None),
    }
    assert [row.met for row in prefill_decode.table_rows(found) if row.claim.startswith("3P1D")] == [False]


def test_prefill_apart_and_together_roll_out_the_same_batch() -> None:
    apart = prefill_decode.rollout_seconds("30B-A3B", 1, 1, apart=True, batch=16)
    together = prefill_decode.rollout_seconds("30B-A3B", 1, 1, apart=False, batch=16)
    # Neither is bound by more than the turns of its longest trajectory.
    assert 0.5 < together / apart < 2
