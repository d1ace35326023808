import math

import pytest

from infra.models import model_of
from tasks.simulation.rollart import weights
from tasks.simulation.rollart.clusters import MODELS as CATALOGUE
from tasks.simulation.rollart.weights import Line


def test_a_line_has_the_latency_and_the_rate_of_its_points() -> None:
    # 1 GB in 3 s and 3 GB in 7 s: 2 s a GB after 1 s.
    line = Line.through([(1.0, 3.0), (3.0, 7.0)], "line")
    assert (line.latency_s, line.gb_per_s) == (pytest.approx(1.0), pytest.approx(0.5))
    assert line.seconds(10.0) == pytest.approx(21.0)


def test_a_proportional_transport_has_no_latency() -> None:
    # Least squares through the origin: (1 x 3 + 3 x 7) / (1 + 9) = 2.4 s a GB.
    line = Line.through([(1.0, 3.0), (3.0, 7.0)], "proportional")
    assert (line.latency_s, line.gb_per_s) == (0.0, pytest.approx(1 / 2.4))


@pytest.mark.parametrize("form", ["line", "proportional"])
def test_no_size_is_predicted_from_itself(form: weights.Form) -> None:
    table = weights.TABLE_3["NCCL over TCP, 200 GbE"]
    before = weights.without("14B", table, form)
    assert weights.without("14B", {**table, "14B": 1000.0}, form) == before
    assert weights.without("14B", {**table, "8B": 1.0}, form) != before


@pytest.mark.parametrize("model", weights.MODELS)
def test_the_tables_gb_are_gib_of_the_catalogues_weights(model: str) -> None:
    gib = model_of(CATALOGUE[model]).weight_bytes / 2**30
    assert gib == pytest.approx(weights.SIZES_GB[model], rel=0.005)


@pytest.mark.parametrize("model", weights.MODELS)
def test_the_synchronous_broadcast_lasts_as_long_as_table_3_says(model: str) -> None:
    spec = weights.synchronous(model)
    seconds = spec["latency_s"] + model_of(CATALOGUE[model]).weight_bytes / 1e9 / spec["pull_gb_s"]
    assert seconds == pytest.approx(weights.TABLE_3["NCCL over TCP, 200 GbE"][model])
    assert "push_gb_s" not in spec  # with a push it would be a store's


def test_rows_say_why_a_transport_that_is_no_line_is_missed() -> None:
    rows = weights.transfer_rows()
    assert len(rows) == 12
    assert all(row.note for row in rows if not row.met)
    assert all("not to" in given for row in rows for given in row.rests_on["fitted"])


@pytest.mark.slow
def test_a_quick_reproduction_has_finite_step_times() -> None:
    rows = weights.step_rows(["8B"], 2, {"8B": 8})
    assert all(math.isfinite(row.ours) and row.ours > 0 for row in rows)
