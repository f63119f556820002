"""`listen`: opens a TCP socket on which ranks listen, at one address of the machine."""

from __future__ import annotations

import socket

_BACKLOG = 128


def listen(host: str, port: int) -> socket.socket:
    """Listen at this address only, never at all addresses of the machine. Port 0 means any free port.

    Raises:
        OSError: `host` is not an address of this machine, or the port is taken.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
