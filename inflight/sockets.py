"""Sockets that ranks listen on: at one address of the machine, never on all of them."""

from __future__ import annotations

import socket

_BACKLOG = 128


def listen(host: str, port: int) -> socket.socket:
    """A TCP socket that listens at this address of the machine only. Port 0 takes a free port.

    Raises:
        OSError: it is not an address of this machine, or the port is taken.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
