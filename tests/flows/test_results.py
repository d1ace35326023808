"""Results of flows and tasks: plain JSON, or not kept at all."""

import importlib
import json
from pathlib import Path

import pytest
from prefect import Flow, Task
from prefect.serializers import JSONSerializer

from flows.results import JSON
from tasks.report.intervals import Interval

ROOT = Path(__file__).parents[2]
MODULES = [f"flows.{path.stem}" for path in sorted((ROOT / "flows").glob("*.py")) if path.stem != "__init__"]


@pytest.mark.parametrize("module", MODULES)
def test_nothing_that_prefect_may_keep_is_a_pickle(module: str) -> None:
    for name, value in vars(importlib.import_module(module)).items():
        if not isinstance(value, Flow | Task):
            continue
        serializer = value.result_serializer
        plain = isinstance(serializer, JSONSerializer) and serializer.object_decoder is None
        assert plain or value.persist_result is False, f"{module}.{name}"


def test_a_result_is_json_that_anything_reads() -> None:
    result = {"sums": Interval(mean=0.5, low=0.25, high=0.75, episodes=8)}
    written = JSON.dumps(result)
    assert json.loads(written)["sums"]["mean"] == 0.5
    assert JSON.loads(written) == json.loads(written)


def test_a_name_in_a_result_is_not_imported() -> None:
    hostile = b'{"__class__": "os.system", "data": "true"}'
    assert JSON.loads(hostile) == json.loads(hostile)
