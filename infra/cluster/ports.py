"""Free ports on loopback, and whether something listens on one."""

import asyncio
import contextlib
import random
import socket

from infra.cluster.config import Ports

LOOPBACK = "127.0.0.1"
GRPC_OFFSET = 10000
"""SeaweedFS listens for gRPC at each of its ports plus this."""


class PortTaken(RuntimeError):
    """A port that a part of the cluster needs is in use. The message names the option."""


def with_free_ports(ports: Ports) -> Ports:
    """These ports, free ones in the place of zeros. Raises `PortTaken`."""
    chosen: dict[str, int] = {}
    for name, port in ports.model_dump().items():
        if port == 0:
            port = free_port(set(chosen.values()))
        elif not _is_free(port):
            raise PortTaken(f"port {port} of {name} is in use: choose another by --ports.{name}, or 0")
        chosen[name] = port
    return Ports(**chosen)


def free_port(taken: set[int]) -> int:
    """A free port whose gRPC neighbour is free too, not in `taken`, which it joins."""
    while True:
        # Below the range that the system gives to outgoing connections, neighbour included.
        port = random.randrange(11000, 22000)
        if port not in taken and _is_free(port) and _is_free(port + GRPC_OFFSET):
            taken.update((port, port + GRPC_OFFSET))
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


async def answers(port: int) -> bool:
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection(LOOPBACK, port)
        writer.close()
        return True
    return False
