"""Warnings that strangers can cause: a line a second, and how many were left out."""

from __future__ import annotations

import logging

import pytest

from inflight import counted_warning
from inflight.counted_warning import CountedWarning


def test_a_line_a_second_says_how_many_were_left_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(counted_warning.time, "monotonic", lambda: now[0])
    warning = CountedWarning(logging.getLogger("x"))
    for seconds in (0.0, 0.4, 0.5, 0.2, 0.9, 5.0):
        now[0] += seconds
        warning.log("%s was dropped", f"{now[0]:.1f}")
    assert caplog.messages == [
        "100.0 was dropped",
        "101.1 was dropped (and 2 more since the last such line)",
        "107.0 was dropped (and 1 more since the last such line)",
    ]
