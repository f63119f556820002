"""`free_port`: processes that look for ports at the same time never get the same."""

from __future__ import annotations

import socket
from itertools import islice

import pytest

from benchmarks.shared import free_port as module
from benchmarks.shared.free_port import FIRST, IN_A_ROW, LAST, free_port, ports


@pytest.mark.parametrize("num_workers", [1, 4, 7])
def test_no_port_is_given_twice(num_workers: int) -> None:
    given = []
    for worker in range(num_workers):
        firsts = list(islice(ports(worker, num_workers), (LAST - FIRST) // num_workers // IN_A_ROW))
        given += [first + number for first in firsts for number in range(IN_A_ROW)]
    assert len(set(given)) == len(given) > (LAST - FIRST) * 0.99
    assert min(given) >= FIRST and max(given) < LAST


def test_ports_in_use_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = free_port(IN_A_ROW), free_port(IN_A_ROW)
    monkeypatch.setattr(module, "_ports", iter([first, first, second]))
    with socket.create_server(("127.0.0.1", first + 2)):
        assert free_port(2) == first
        assert free_port(3) == second
