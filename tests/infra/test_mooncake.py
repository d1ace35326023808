"""The Mooncake service: it starts, and it ends with its parent and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from infra.mooncake import MooncakeServiceSettings
from tests.mooncake import skip_without_mooncake, start, stop


def alive(pid: int) -> bool:
    """A zombie that init has not yet buried is not alive."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 30
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a Mooncake process outlived its parent"
        time.sleep(0.05)


@pytest.mark.parametrize("killed", [False, True])
def test_no_process_outlives_the_service(killed: bool) -> None:
    skip_without_mooncake()
    service, ready = start(segment_gib=0.02)
    assert ready["url"].startswith("mooncake://127.0.0.1:")
    assert [alive(pid) for pid in ready["pids"]] == [True, True]
    if killed:
        service.send_signal(signal.SIGKILL)
    stop(service)
    wait_for_end(ready["pids"])


def test_the_service_ends_with_an_error_when_one_of_its_processes_does() -> None:
    skip_without_mooncake()
    service, ready = start(segment_gib=0.02)
    os.kill(ready["pids"][0], signal.SIGKILL)
    assert service.wait(30) != 0
    wait_for_end(ready["pids"])
    stop(service)


def test_a_second_store_process_joins_a_master() -> None:
    skip_without_mooncake()
    service, ready = start(segment_gib=0.02)
    second, joined = start(segment_gib=0.02, master=ready["url"].removeprefix("mooncake://"))
    assert joined["url"] == ready["url"]
    assert len(joined["pids"]) == 1
    stop(second)
    stop(service)


def test_without_the_package_the_error_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['mooncake'] = None\n"
        "import importlib.util as u; u.find_spec = lambda name: None\n"
        "from infra.processes import serve; from infra.mooncake import serve_mooncake\n"
        "serve(serve_mooncake)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps({}) + "\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode != 0
    assert "pip install mooncake-transfer-engine-non-cuda" in ended.stderr


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="segment_gb"):
        MooncakeServiceSettings.model_validate({"segment_gb": 1})
