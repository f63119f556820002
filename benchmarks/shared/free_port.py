"""`free_port`: a port for a server that another process will start."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator

FIRST, LAST = 20_000, 32_000  # below the ports that Linux gives to connections, so none of them takes it meanwhile
IN_A_ROW = 8


def ports(worker: int = 0, num_workers: int = 1) -> Iterator[int]:
    """Ports of one of several processes that look for ports at the same time, IN_A_ROW apart. No two processes have one in
    common, and none comes again before all others. The first is drawn by chance, for unrelated processes look for some, too."""
    size = (LAST - FIRST) // num_workers
    own = range(FIRST + worker * size, FIRST + (worker + 1) * size - IN_A_ROW + 1, IN_A_ROW)
    index = secrets.randbelow(len(own))
    while True:
        yield own[index]
        index = (index + 1) % len(own)


# the processes of pytest-xdist are numbered gw0, gw1, ...
_ports = ports(
    int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
)


def free_port(count: int = 1) -> int:
    """Returns the first of `count` ports in a row (at most IN_A_ROW) at which nobody listens. Other ones at each call."""
    assert count <= IN_A_ROW
    while True:
        first = next(_ports)
        try:
            for port in range(first, first + count):
                socket.create_server(("", port)).close()
        except OSError:
            continue
        return first
