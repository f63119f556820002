"""Lines that a slow reader, or none, reads: nobody waits, and what is lost is counted."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from typing import BinaryIO

import pytest

from inflight import line_writer
from inflight.line_writer import MAX_LINES, LineWriter, open_without_waiting


@contextlib.contextmanager
def pipe() -> Iterator[tuple[BinaryIO, BinaryIO]]:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as read, os.fdopen(writer, "wb") as written:
        yield read, written


def test_nobody_waits_for_who_reads() -> None:
    reports: list[int] = []
    with pipe() as (read, written):
        lines = LineWriter(written.fileno(), reports.append)
        for number in range(MAX_LINES + 5000):  # the pipe takes 64 KiB
            lines.put(f"{number:>99}\n")
        lines.flush(0.05)
        assert reports == [1]
        first = [int(read.readline()) for _ in range(MAX_LINES)]
        assert first == list(range(MAX_LINES))
        assert 5000 - 2 * 2**16 // 100 < lines.num_dropped <= 5000
        for _ in range(5000 - lines.num_dropped):
            read.readline()
        lines.close(300)
        assert reports == [1, lines.num_dropped]


@pytest.mark.parametrize(("lines_", "bytes_"), [(3, 2**30), (100, 2**20 + 3)])
def test_what_waits_is_bounded(lines_: int, bytes_: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_writer, "MAX_LINES", lines_)
    monkeypatch.setattr(line_writer, "MAX_BYTES", bytes_)
    with pipe() as (read, written):
        lines = LineWriter(written.fileno(), lambda number: None)
        lines.put("x" * 2**20)  # more than a pipe holds: the thread waits
        while lines._queue.qsize():
            time.sleep(0.001)
        for _ in range(5):
            lines.put("y")
        assert lines.num_dropped == 2
        read.close()
        lines.close(300)


def test_lines_of_a_reader_that_has_gone_are_counted() -> None:
    reports: list[int] = []
    with pipe() as (read, written):
        read.close()
        lines = LineWriter(written.fileno(), reports.append)
        lines.put("x")
        lines.put("y")
        lines.close(300)
    assert lines.num_dropped == 2 == reports[-1]


def test_a_pipe_that_its_maker_has_set_to_not_wait_gets_all_lines() -> None:
    with pipe() as (read, written):
        os.set_blocking(written.fileno(), False)
        lines = LineWriter(written.fileno(), lambda number: None)
        for number in range(5000):
            lines.put(f"{number:>99}\n")
        assert [int(read.readline()) for _ in range(5000)] == list(range(5000))
        lines.close(300)
    assert lines.num_dropped == 0


def test_a_report_may_be_a_line() -> None:
    with pipe() as (read, written):
        lines = LineWriter(written.fileno(), lambda number: lines.put(f"dropped {number}\n"))
        for _ in range(MAX_LINES + 5000):
            lines.put(f"{'x' * 98}\n")
        while not (line := read.readline()).startswith(b"dropped"):
            pass
        lines.close(300)
    assert int(line.split()[1]) == lines.num_dropped


def test_a_forked_process_writes_its_lines() -> None:
    with pipe() as (read, written):
        lines = LineWriter(written.fileno(), lambda number: None)
        lines.put("of the parent\n")
        lines.flush(300)
        child = os.fork()  # of a process with threads: the child only does what such a child may do
        if not child:
            lines.put("of the child\n")
            lines.flush(300)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert [read.readline(), read.readline()] == [b"of the parent\n", b"of the child\n"]
        lines.close(300)


def test_flush_waits_for_the_lines_but_not_for_ever() -> None:
    with pipe() as (read, written):
        lines = LineWriter(written.fileno(), lambda number: None)
        lines.put("x" * 2**20)
        lines.flush(0.01)
        assert len(read.read(2**20)) == 2**20
        lines.put("y")
        lines.flush(300)
        assert read.read(1) == b"y"
        lines.close(300)
        lines.flush(300)


def test_a_descriptor_to_which_writes_do_not_wait() -> None:
    with pipe() as (_, written):
        other = open_without_waiting(written.fileno())
        assert os.get_blocking(written.fileno()) and not os.get_blocking(other)
        assert os.write(other, b"x" * 2**20) < 2**20
        os.close(other)
    first, second = socket.socketpair()
    with first, second:
        assert open_without_waiting(first.fileno()) == first.fileno()
    with open(__file__, "rb") as file:
        assert open_without_waiting(file.fileno()) == file.fileno()
