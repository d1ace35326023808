"""A weight store of every kind."""

import uuid
from pathlib import Path

import pytest

from blocks.weight_store import WeightStore, open_weight_store
from tests.mooncake import fresh_url


@pytest.fixture(params=["local", "memory", "mooncake"])
def weights(request: pytest.FixtureRequest, tmp_path: Path) -> WeightStore:
    if request.param == "mooncake":
        return open_weight_store(fresh_url())
    return open_weight_store(str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}")
