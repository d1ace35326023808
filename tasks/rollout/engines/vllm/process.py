"""The vLLM server's process, seen from the engine service, which is its parent."""

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path

import tasks
from infra.rpc import RpcError
from tasks.rollout.engines.vllm.settings import VllmServerSettings

_MODULE = "tasks.rollout.engines.vllm.server"


class VllmProcess:
    """A vLLM server that never outlives its parent. Its log is the parent's standard error."""

    def __init__(self, process: asyncio.subprocess.Process, url: str):
        self._process = process
        self._ended = asyncio.create_task(self._sweep(), name="vllm-process")
        self.url = url

    @classmethod
    async def start(cls, settings: VllmServerSettings, interpreter: str) -> "VllmProcess":
        """Returns once its port is bound; it answers there when its model is loaded, half a minute later.

        Raises `RpcError` of code `engine_failed` when it ends before that.
        """
        process = await asyncio.create_subprocess_exec(
            interpreter,
            "-m",
            _MODULE,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=_environment(settings.engine.threads),
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(settings.model_dump_json().encode() + b"\n")
        server = cls(process, "")
        try:
            line = await process.stdout.readline()
        except asyncio.CancelledError:
            await server.stop()
            raise
        if not line:
            raise RpcError("engine_failed", await server.wait())
        server.url = json.loads(line)["url"]
        return server

    @property
    def running(self) -> bool:
        return not self._ended.done()

    async def wait(self) -> str:
        """Wait until it has ended, and none of its processes is left; returns what to say of it."""
        code = await asyncio.shield(self._ended)
        return f"the vLLM server ended (exit code {code}); why is in this engine's log"

    async def stop(self, grace_s: float = 3.0) -> None:
        """Let it end in order; kill it after `grace_s`, which must be below the service's own grace."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await asyncio.shield(self._ended)
        self._kill()
        await asyncio.shield(self._ended)

    async def _sweep(self) -> int:
        """vLLM's engine core outlives an API server that was killed: what is left of the group is killed."""
        code = await self._process.wait()
        self._kill()
        return code

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _environment(threads: int) -> dict[str, str]:
    root = str(Path(next(iter(tasks.__path__))).parent)
    inherited = os.environ.get("PYTHONPATH")
    return {
        # What a worker's processes say to each other stays on the machine.
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
        "PYTHONPATH": f"{root}{os.pathsep}{inherited}" if inherited else root,
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause and update
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",  # a request must not meet a connection that just timed out
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
