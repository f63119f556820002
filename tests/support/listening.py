"""Where processes listen, as the kernel says it."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.support.descriptors import open_descriptors
from tests.support.processes import exists

_LISTENS = "0A"  # the state TCP_LISTEN in /proc/PID/net/tcp


def listening_hosts(pids: Iterable[int]) -> set[str]:
    """The addresses of all TCP sockets that these processes listen on: "0.0.0.0" and "::" stand for all of the machine's. A
    process that has ended meanwhile listens on none."""
    found = set()
    for pid in pids:
        try:
            found |= set(_listening_hosts(pid))
        except OSError:
            if exists(pid):
                raise
    return found


def _listening_hosts(pid: int) -> Iterator[str]:
    own = set(open_descriptors(pid).values())
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            (_, local, _, state, *_) = fields = line.split()
            if state == _LISTENS and f"socket:[{fields[9]}]" in own:
                yield str(_address(local.partition(":")[0]))


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """In words of four bytes, each with the least significant byte first."""
    words = bytes.fromhex(text)
    return ipaddress.ip_address(b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4)))
