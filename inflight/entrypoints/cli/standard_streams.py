"""`open_standard_streams`: a command that was started with closed standard streams, as some daemons are, gets empty ones."""

from __future__ import annotations

import os
import sys


def open_standard_streams() -> None:
    """Without them the next files and sockets take their numbers: a child's output would go into a client's connection."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  until the process ends
