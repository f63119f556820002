"""Percentiles, the memory of a process, and tables."""

from __future__ import annotations

import random

import pytest

from benchmarks.shared.report import memory_bytes, percentile, print_table


def test_percentile() -> None:
    values = [float(value) for value in range(1, 101)]
    random.Random(0).shuffle(values)
    assert [percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert percentile([7.0], 0.5) == percentile([7.0], 0.99) == 7.0


def test_memory_of_this_process() -> None:
    assert 2**20 < memory_bytes("VmRSS") <= memory_bytes("VmHWM")
    with pytest.raises(ValueError, match="VmNone"):
        memory_bytes("VmNone")


def test_a_table_is_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["name", "x"], [["a", 1], ["longer", 100]])
    assert capsys.readouterr().out == "\nname      x\na         1\nlonger  100\n"
