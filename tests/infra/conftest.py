import uuid
from pathlib import Path
from typing import Any

import pytest

from infra.object_store import ObjectStore
from tests.s3_server import S3Server


@pytest.fixture(scope="session")
def s3_options(s3: S3Server) -> dict[str, Any]:
    return s3.options


@pytest.fixture(params=["local", "memory", "held", pytest.param("s3", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "local":
        return ObjectStore(str(tmp_path / "store"))
    if request.param in ("memory", "held"):
        return ObjectStore(f"{request.param}://{uuid.uuid4().hex}/run")
    return ObjectStore(f"s3://tutti/{uuid.uuid4().hex}/run", request.getfixturevalue("s3_options"))
