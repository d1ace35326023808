import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from infra.processes import ServiceFailed, ServiceProcess

MODULE = "tests.infra.services"


def alive(pid: int) -> bool:
    """Running, and not a zombie that waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def gone_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


async def test_it_gets_its_settings_and_says_when_it_serves(tmp_path: Path) -> None:
    service = await ServiceProcess.start("s", MODULE, {"say": "hello"}, tmp_path / "s.log")
    assert service.ready["said"] == "hello"
    assert alive(service.ready["pid"])
    await service.stop()
    assert not alive(service.ready["pid"])
    service.kill()
    assert gone_within(service.ready["child"], 5)


async def test_a_failed_start_names_the_log_and_shows_its_end(tmp_path: Path) -> None:
    with pytest.raises(ServiceFailed, match="this service cannot start"):
        await ServiceProcess.start("s", MODULE, {"fail": True}, tmp_path / "s.log")


async def test_a_service_that_never_serves_is_ended(tmp_path: Path) -> None:
    with pytest.raises(ServiceFailed, match="did not start"):
        await ServiceProcess.start("s", MODULE, {"silent": True}, tmp_path / "s.log", start_limit_s=1.5)


async def test_kill_ends_the_whole_process_group(tmp_path: Path) -> None:
    service = await ServiceProcess.start("s", MODULE, {"say": ""}, tmp_path / "s.log")
    service.kill()
    await service.wait()
    assert gone_within(service.ready["child"], 5)


async def test_a_frozen_service_is_killed_after_the_grace_with_its_group(tmp_path: Path) -> None:
    service = await ServiceProcess.start("s", MODULE, {"say": ""}, tmp_path / "s.log")
    os.kill(service.ready["pid"], signal.SIGSTOP)
    await service.stop(grace_s=0.3)
    assert not alive(service.ready["pid"])
    assert gone_within(service.ready["child"], 5)


@pytest.mark.parametrize("frozen", [False, True])
def test_it_ends_when_its_parent_is_killed(tmp_path: Path, frozen: bool) -> None:
    script = textwrap.dedent(
        f"""
        import asyncio, json, sys
        from pathlib import Path
        from infra.processes import ServiceProcess
        async def main():
            log = Path({str(tmp_path)!r}) / "s.log"
            service = await ServiceProcess.start("s", {MODULE!r}, {{"say": ""}}, log)
            print(json.dumps(service.ready), flush=True)
            await asyncio.sleep(600)
        asyncio.run(main())
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    ready = json.loads(parent.stdout.readline())
    if frozen:
        os.kill(ready["pid"], signal.SIGSTOP)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert gone_within(ready["pid"], 8)
    os.kill(ready["child"], signal.SIGKILL)


async def test_settings_do_not_show_in_the_process_list(tmp_path: Path) -> None:
    service = await ServiceProcess.start("s", MODULE, {"say": "s3cret"}, tmp_path / "s.log")
    assert b"s3cret" not in command_line(service.ready["pid"])
    await service.stop()
    service.kill()
