"""Become a command with limits that dies with its parent: `python limited_process.py BYTES PARENT COMMAND`.

BYTES is the address space it may use, 0 for no limit. Imports nothing but the standard library, since a
process goes through it for every episode of an agent.
"""

import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    memory, parent, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
