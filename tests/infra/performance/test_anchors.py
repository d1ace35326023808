import pytest

from infra.performance.anchor_table import table
from infra.performance.anchors import anchors


@pytest.fixture(scope="module")
def rows():
    found = anchors()
    print("\n" + table(found))
    return found


def test_all_published_groups_are_listed_with_a_prediction_or_a_reason(rows):
    groups = ("KV capacity", "all-reduce", "BLIS", "AIConfigurator", "InferSim", "Qwen3 official", "verl")
    assert {row.group for row in rows} == {*groups, "NeMo AutoModel"}
    for row in rows:
        assert row.measured > 0
        assert row.predicted is not None or row.note


def test_the_kv_table_is_the_one_published(rows):
    for row in rows:
        if row.group == "KV capacity":
            assert abs(row.deviation) < 0.05


def test_time_per_token_of_engines_is_within_what_a_roofline_of_kernels_can_tell(rows):
    """The gate is wide on purpose: the table is the result. A bare roofline misses by half."""
    served = [row for row in rows if row.group in ("BLIS", "InferSim") and row.predicted is not None]
    errors = sorted(abs(row.deviation) for row in served)
    assert len(errors) == 13
    assert errors[len(errors) // 2] < 0.15
    assert errors[-1] < 0.35
