"""One real Mooncake master and store process for all tests of a session, where the package is installed.

Each test takes a prefix of its own. The service ends with this process: its standard input is a pipe from it.
"""

import functools
import json
import subprocess
import sys
import uuid
from typing import Any

import pytest

from infra.mooncake import MooncakeUnavailable, binary

SEGMENT_GIB = 0.5


def start(**settings: Any) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    """A service of one's own, and what it says of itself. Its end is the caller's to see to."""
    service = subprocess.Popen(
        [sys.executable, "-m", "infra.mooncake"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert service.stdin is not None
    assert service.stdout is not None
    service.stdin.write(json.dumps({"segment_gib": SEGMENT_GIB, **settings}).encode() + b"\n")
    service.stdin.flush()
    line = service.stdout.readline()
    assert line, "the Mooncake service did not start"
    return service, json.loads(line)


def stop(service: subprocess.Popen[bytes]) -> None:
    assert service.stdin is not None
    assert service.stdout is not None
    service.stdin.close()
    service.wait(30)
    service.stdout.close()


@functools.cache
def _shared() -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    return start()


def skip_without_mooncake() -> None:
    try:
        binary("mooncake_master")
        import mooncake.store  # noqa: F401
    except (MooncakeUnavailable, ImportError) as error:
        pytest.skip(
            "no Mooncake here: pip install mooncake-transfer-engine-non-cuda, and Debian's libibverbs1, "
            f"librdmacm1 and libnuma1 ({error})"
        )


def fresh_url() -> str:
    """A prefix of the shared store that nobody used."""
    skip_without_mooncake()
    return f"{_shared()[1]['url']}/{uuid.uuid4().hex}"
