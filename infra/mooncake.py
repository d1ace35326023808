"""A Mooncake store as a service process: the master, and a store process whose memory holds what is stored.

    ServiceProcess.start("mooncake", "infra.mooncake", {"segment_gib": 4}, log)

Trainers and engines join as clients without memory of their own (a segment of 0 bytes), so what a trainer
put outlives the trainer: it is lost only with the store process. More machines lend memory by a service of
their own with `master` set. The binaries come with the package `mooncake-transfer-engine-non-cuda` (or its
CUDA build), which needs Debian's libibverbs1, librdmacm1 and libnuma1.
"""

import asyncio
import contextlib
import ctypes
import importlib.util
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveFloat, PositiveInt

from infra.config import Config

_PR_SET_PDEATHSIG = 1
TCP_DEFAULTS = {
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_TCP_LANES_PER_PEER": "1",
    "MC_TCP_SLICE_SIZE": str(4 * 2**20),
}
"""Environment of clients and store processes, unless set otherwise. Measured on two cores over loopback: a
connection that is kept and slices of 4 MiB move buckets up to half faster than the package's own defaults."""


class MooncakeUnavailable(RuntimeError):
    """Mooncake cannot run here; the message says what to install."""


class MooncakeServiceSettings(Config):
    host: str = "127.0.0.1"
    """Address that master and store process bind to and that other machines reach."""
    port: int = Field(default=0, ge=0, le=65535)
    """Of the master; 0 takes a free one."""
    segment_gib: PositiveFloat = 4.0
    """Memory that the store process lends. It must hold every version kept and the one being published."""
    master: str | None = None
    """`host:port` of a running master: then only a store process starts, which lends memory to it."""
    protocol: str = "tcp"
    """Transfer protocol of the store process: tcp, or rdma where the network has it."""
    device: str = ""
    """RDMA devices, separated by commas."""
    lease_ms: PositiveInt = 60_000
    """A read that takes longer is made again. Tutti's own removals do not wait for leases."""
    start_limit_s: PositiveFloat = 30.0


def binary(name: str) -> str:
    """The path of a program of the Mooncake package. Raises `MooncakeUnavailable`."""
    spec = importlib.util.find_spec("mooncake")
    for folder in spec.submodule_search_locations or [] if spec is not None else []:
        path = Path(folder) / name
        if path.is_file():
            return str(path)
    raise MooncakeUnavailable(
        f"there is no {name} in {sys.executable}'s packages: pip install mooncake-transfer-engine-non-cuda, "
        "or set stores.weights to an fsspec URL"
    )


async def serve_mooncake(settings: dict[str, Any], ready: Callable[[dict[str, Any]], None]) -> None:
    """Serves until cancelled; see `MooncakeServiceSettings`. Says `url` (mooncake://host:port) and `pids`.

    Raises `MooncakeUnavailable` when a program is missing, cannot start, or ends.
    """
    parsed = MooncakeServiceSettings.model_validate(settings)
    async with contextlib.AsyncExitStack() as stack:
        running = []
        master = parsed.master
        if master is None:
            port = parsed.port or free_port(parsed.host)
            master = f"{parsed.host}:{port}"
            command = [
                binary("mooncake_master"),
                f"-rpc_address={parsed.host}",
                f"-rpc_port={port}",
                f"-metrics_host={parsed.host}",
                f"-metrics_port={free_port(parsed.host)}",
                f"-default_kv_lease_ttl={parsed.lease_ms}",
                "-logtostderr",
                "-minloglevel=1",
            ]
            running.append(await stack.enter_async_context(_running(command)))
            await _listening(running[-1], parsed.host, port, parsed.start_limit_s)
        store_port = free_port(parsed.host)
        command = [
            binary("mooncake_client"),
            f"-host={parsed.host}",
            f"-port={store_port}",
            f"-global_segment_size={int(parsed.segment_gib * 2**20)} KB",
            f"-master_server_address={master}",
            "-metadata_server=P2PHANDSHAKE",
            f"-protocol={parsed.protocol}",
            f"-device_names={parsed.device}",
            "-logtostderr",
            "-minloglevel=1",
        ]
        running.append(await stack.enter_async_context(_running(command)))
        await _listening(running[-1], parsed.host, store_port, parsed.start_limit_s)
        ready({"url": f"mooncake://{master}", "pids": [process.pid for process in running]})
        ends = [asyncio.ensure_future(process.wait()) for process in running]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        raise MooncakeUnavailable("a Mooncake process ended by itself; its log says why")


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
    return port


@contextlib.asynccontextmanager
async def _running(command: Sequence[str]) -> AsyncIterator[asyncio.subprocess.Process]:
    """A program that gets SIGTERM with its parent, however that ends."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=sys.stderr,
        env={**TCP_DEFAULTS, **os.environ},
        preexec_fn=_end_with_parent,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


async def _listening(process: asyncio.subprocess.Process, host: str, port: int, limit_s: float) -> None:
    try:
        async with asyncio.timeout(limit_s):
            while process.returncode is None:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection(host, port)
                    writer.close()
                    return
                await asyncio.sleep(0.05)
    except TimeoutError:
        pass
    raise MooncakeUnavailable(
        f"a Mooncake process did not listen on {host}:{port} within {limit_s:g} s (exit status "
        f"{process.returncode}); it needs Debian's libibverbs1, librdmacm1 and libnuma1"
    )


if __name__ == "__main__":
    from infra.processes import serve

    serve(serve_mooncake)
