"""The vLLM server's process: this module, run by the interpreter of the environment that has vLLM.

It reads `VllmServerSettings` as one JSON line from its standard input and then holds that pipe as a life
line, as `infra.processes` describes. It prints one JSON line (`{"url": ...}`) once its port is bound; vLLM
answers there when its model is loaded. Everything else that vLLM prints goes to standard error.

The process leads a process group, which vLLM's own children (engine core, a worker a device) are in. However
it ends on its own, it takes the group with it; where it is killed, its parent does (`process.py`).
"""

import argparse
import json
import os
import signal
import sys
import threading
from typing import Any

from infra.processes import wake_with_parent
from tasks.rollout.engines.vllm.door import Door
from tasks.rollout.engines.vllm.settings import VllmServerSettings, arguments

_GRACE_S = 4.0


def main() -> None:
    wake_with_parent()
    settings = VllmServerSettings.model_validate_json(sys.stdin.buffer.readline())
    announcements = os.dup(1)
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, daemon=True, name="life-line").start()
    Door.token = settings.token
    try:
        _serve(settings, announcements)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.killpg(os.getpgrp(), signal.SIGKILL)


def _serve(settings: VllmServerSettings, announcements: int) -> None:
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server_worker
    from vllm.entrypoints.launchers.launcher import setup_server
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.platforms import current_platform

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt("told to end")

    # uvicorn replaces this by its own graceful exit once it serves.
    signal.signal(signal.SIGTERM, interrupt)
    cli_env_setup()
    cpu = current_platform.is_cpu()
    if cpu and settings.engine.enforce_eager:
        # Even then vLLM compiles one small function of its sampler: twenty seconds at the first request.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    parsed = _parse(arguments(settings, cpu=cpu))
    _, socket = setup_server(parsed, reuse_port=False)
    host, port = socket.getsockname()[:2]
    url = f"http://{host}:{port}"
    os.write(announcements, json.dumps({"url": url}).encode() + b"\n")
    uvloop.run(run_server_worker(url, socket, parsed))


def _parse(words: list[str]) -> argparse.Namespace:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parsed: argparse.Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    validate_parsed_serve_args(parsed)
    return parsed


def _end_with_parent() -> None:
    while os.read(0, 4096):
        continue
    # A server that hangs, or is still compiling, does not heed the signal.
    threading.Timer(_GRACE_S, os.killpg, [os.getpgrp(), signal.SIGKILL]).start()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
