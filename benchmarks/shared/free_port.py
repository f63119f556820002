"""`free_port`: a port for a server that another process will start."""

from __future__ import annotations

import secrets
import socket

FIRST, LAST = 20_000, 32_000  # below the ports that Linux gives to connections, so none of them takes it meanwhile


def free_port() -> int:
    """Returns a port of 127.0.0.1 at which nobody listens. It is drawn by chance, because other processes look for one, too."""
    while True:
        port = FIRST + secrets.randbelow(LAST - FIRST)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
