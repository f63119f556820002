"""A process dies or is stopped just before the server is told to end: the server ends as usual, and nothing of it is left."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shared.mock_executor import NAME
from inflight.hub import EMBEDDED_MODEL
from tests.e2e.serve_process import assert_nothing_left, serving, tree_of
from tests.support.waits import wait_until

TIME = ["--shutdown-timeout", "2", "--num-threads", "1"]
MOCK = [*TIME, "--distributed-executor-backend", NAME]
TWO_RANKS = [*TIME, "--tensor-parallel-size", "2", "--dtype", "float32", "--kv-cache-memory-bytes", str(1 << 24)]
SPARES = ["--fault-tolerance-config", '{"spare_workers": 1}']
PRESETS = """[*]
kv-cache-memory-bytes = 16M
[chat]
load-on-startup = true
max-model-len = 2048
"""
# layout -> its options, and processes that may die; those of "models" are a folder
LAYOUTS: dict[str, tuple[list[str], list[str]]] = {
    "plain": (MOCK, ["engine"]),
    "front ends": ([*MOCK, "-dp", "2", "--api-server-count", "2"], ["engine 1", "front end 0"]),
    "two ranks": (TWO_RANKS, ["engine", "worker tp1 pp0"]),
    "spares": ([*TWO_RANKS, *SPARES], ["engine", "worker spare", "spare engine"]),
    "models": (TIME, ["model chat", "engine", "spare model"]),
}
DELAYS = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # seconds between the fault and the signal
FAULTS, SIGNALS = (signal.SIGKILL, signal.SIGSTOP), (signal.SIGTERM, signal.SIGINT)
QUICK = {("plain", "engine", signal.SIGSTOP, 0.0), ("front ends", "engine 1", signal.SIGKILL, 0.003)}


def cases() -> Iterator[Any]:  # Any: what pytest makes of a parameter
    victims = [(layout, victim) for layout, (_, victims) in LAYOUTS.items() for victim in victims]
    for index, ((layout, victim), fault, delay) in enumerate(itertools.product(victims, FAULTS, DELAYS)):
        is_quick = (layout, victim, fault, delay) in QUICK
        if is_quick or index % 3 == 0:
            marks = [] if is_quick else [pytest.mark.full]
            yield pytest.param(layout, victim, fault, delay, SIGNALS[index % 2], marks=marks)


@pytest.mark.parametrize(("layout", "victim", "fault", "delay", "number"), list(cases()))
def test_it_ends_as_usual(
    tmp_path: Path, layout: str, victim: str, fault: signal.Signals, delay: float, number: signal.Signals
) -> None:
    """If it hung, its watchdog would end it with exit code 1."""
    options = list(LAYOUTS[layout][0])
    if layout == "models":
        (tmp_path / "chat").symlink_to(EMBEDDED_MODEL)
        (tmp_path / "presets.ini").write_text(PRESETS)
        options += ["--models-dir", str(tmp_path), "--models-preset", str(tmp_path / "presets.ini")]
    with serving(*options, has_name=layout != "models") as server:
        if layout == "models":
            wait_until(lambda: "model chat is loaded" in server.text_of_log())
        pid = wait_until(lambda: {title.strip(): pid for title, pid in server.children().items()}.get(victim))
        streams = [] if layout == "models" else [server.start_stream(500) for _ in range(2)]
        pids = tree_of(server.popen.pid)
        os.kill(pid, fault)
        time.sleep(delay)
        pids |= tree_of(server.popen.pid)
        server.popen.send_signal(number)
        assert server.end() == 0, server.text_of_log()
        for stream in streams:
            stream.connection.close()
        assert_nothing_left(pids, set())
        assert "Traceback" not in server.text_of_log()
