"""One rank of a trainer of several processes.

    python -m torch.distributed.run --nproc-per-node 8 -m tasks.train.ranks SETTINGS

`tasks.train.launch` starts this on one machine. For several, run it on each, with torchrun's own options:

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        -m tasks.train.ranks SETTINGS

Only rank 0 reads SETTINGS: a JSON object, in a file or a named pipe that nobody else can read, with what
`TrainerService.of` takes and token, host and port (by which the campaign's session is to reach it). The
model's directory is read on every node. `--nnodes` x `--nproc-per-node` must be the trainer's processes.
Once it serves, rank 0 prints `{"url": ..., "version": ...}`.

Rank 0 serves the calls and sends each as a JSON command over the process group; then all ranks execute it. A
rank that fails ends, torchrun ends the others, and the caller gets one `RpcError` with the code
`trainer_lost`.
"""

import asyncio
import datetime
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from infra.rpc import RpcError
from tasks.train.process_group import broadcast_json, rank
from tasks.train.service import TrainerService, trainer_server

logger = logging.getLogger(__name__)

GROUP_TIMEOUT_S = 1800.0
"""How long a rank waits for another in a collective before it gives up (a rank that hangs; one that dies is
seen at once). Rank 0 may take so long to write a version to the weight store."""
IDLE_S = 60.0
"""Pause after which rank 0 sends a command that does nothing, so that waiting ranks do not time out."""
LAUNCHER_CHECK_S = 0.5
FAREWELL_S = 0.5


def send_settings(settings: dict[str, Any], pipe: Path) -> None:
    """Write the settings to rank 0, which reads them from the named pipe. Waits for it to open the pipe."""
    with pipe.open("w") as file:
        json.dump(settings, file)


def main(source: Path) -> None:
    end_with_launcher()
    announce = _standard_output()
    settings = json.loads(source.read_text()) if int(os.environ["RANK"]) == 0 else {}
    distributed.init_process_group(
        # Commands and metrics are CPU tensors also where the model is on GPUs.
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        timeout=datetime.timedelta(seconds=GROUP_TIMEOUT_S),
    )
    settings = broadcast_json(settings)
    if rank() == 0:
        asyncio.run(_serve(settings, announce))
    else:
        follow(TrainerService.of(settings))


def follow(service: TrainerService) -> None:
    """A rank other than 0: execute what rank 0 sends, until it or a collective fails."""
    while True:
        command, payload = broadcast_json()
        try:
            service.execute(command, payload)
        except RpcError as error:
            logger.info("%s: %s", command, error)


async def _serve(settings: dict[str, Any], announce: Callable[[dict[str, Any]], None]) -> None:
    """Rank 0. Collectives are made in one thread, in the order of the calls."""
    loop = asyncio.get_running_loop()
    worker = ThreadPoolExecutor(1, "trainer")
    ending = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ending.set)
    service = await loop.run_in_executor(worker, TrainerService.of, settings)

    def work(command: str, payload: Any) -> Any:
        broadcast_json([command, payload])
        return service.execute(command, payload)

    async def run(command: str, payload: Any) -> Any:
        working = loop.run_in_executor(worker, work, command, payload)
        told = asyncio.ensure_future(ending.wait())
        await asyncio.wait({working, told}, return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        if not working.done():
            raise RpcError("trainer_lost", "a process of the trainer ended: see its log")
        try:
            return working.result()
        except RpcError:
            raise
        except Exception as error:
            logger.exception("%s failed", command)
            ending.set()
            raise RpcError("trainer_lost", f"the trainer ended: {type(error).__name__}: {error}") from error

    async def keep_awake() -> None:
        while True:
            await asyncio.sleep(IDLE_S)
            await run("idle", None)

    server = trainer_server(run, settings)
    url = await server.start(settings.get("host", "127.0.0.1"), settings.get("port", 0))
    announce({"url": url, "version": service.version})
    awake = asyncio.ensure_future(keep_awake())
    await ending.wait()
    # Callers get their answer first. Not a plain exit: the worker may be in a collective for a long time.
    await asyncio.sleep(FAREWELL_S)
    awake.cancel()
    os._exit(1)


def end_with_launcher() -> None:
    """End this process once the one that started it is gone, by whatever signal."""
    parent = os.getppid()

    def watch() -> None:
        pause = threading.Event()
        while os.getppid() == parent:
            pause.wait(LAUNCHER_CHECK_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="launcher-watch").start()


def _standard_output() -> Callable[[dict[str, Any]], None]:
    """What announces the service on standard output; whatever else this process prints goes to its log."""
    output = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def announce(ready: dict[str, Any]) -> None:
        os.write(output, json.dumps(ready).encode() + b"\n")

    return announce


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format=f"[rank {os.environ.get('RANK', '?')}] %(message)s")
    main(Path(sys.argv[1]))
