"""Runs a module of the tests on several ranks, as a user would: under torchrun, in processes of its own."""

import os
import signal
import subprocess
import sys
from pathlib import Path


def torchrun(module: str, *arguments: str | Path, ranks: int = 2, timeout_s: float = 240.0) -> None:
    """Raises AssertionError with the end of the output when a rank fails or the time is over."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    process = subprocess.Popen(
        [*command, "-m", module, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        output, _ = process.communicate()
        raise AssertionError(f"{module} took more than {timeout_s} s:\n{output[-4000:]}") from None
    assert process.returncode == 0, f"{module} failed:\n{output[-8000:]}"
