"""A rank that other ranks cannot reach: it reports an address at which it does not listen."""

from __future__ import annotations

import itertools
import socket

from inflight.executor import worker_loop
from inflight.sockets import listen


def deafen(num_epochs: int) -> None:
    """In this process, do not listen in the next `num_epochs` epochs."""
    count = itertools.count()

    def listen_or_not(host: str, port: int) -> socket.socket:
        if next(count) >= num_epochs:
            return listen(host, port)
        deaf = socket.socket()
        deaf.bind((host, port))
        return deaf

    worker_loop.listen = listen_or_not  # type: ignore[attr-defined]
