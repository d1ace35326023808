"""A child that does what it is told, one call after the other."""

import os
import re
import resource
import signal
import subprocess
import sys
import time
from typing import Any

from infra.parent_channel import ParentChannel, serve_in_order


def obey(order: Any) -> Any:
    match order:
        case "pid":
            return os.getpid()
        case "spin":
            while True:
                pass
        case "hold the interpreter lock":
            re.match(r"(a+)+$", "a" * 60 + "b")
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "raise":
            raise KeyError("told to raise")
        case "print":
            print("x" * 100_000)
            return sys.stdin.read()
        case "limit":
            return resource.getrlimit(resource.RLIMIT_AS)[0]
        case "allocate":
            return len(bytearray(2 << 30))
        case "hash":
            return hash("some text")
        case "grandchild":
            return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid
        case ["sleep", seconds]:
            time.sleep(seconds)
            return seconds
        case ["echo", value]:
            return value
        case ["alarm", seconds]:
            signal.signal(signal.SIGALRM, lambda *_: None)
            signal.setitimer(signal.ITIMER_REAL, seconds)
            signal.pause()
            return "woken"
    raise ValueError(order)


if __name__ == "__main__":
    channel = ParentChannel()
    if channel.settings.get("refuse"):
        raise SystemExit("refusing to start")
    serve_in_order(channel, {"obey": obey})
