"""What a spare process does before it becomes its program."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from inflight.entrypoints.router.spare import ENGINE, MODEL, PROGRAMS
from inflight.entrypoints.router.spare_main import _import, _SpareBelow


def test_imports_have_the_lowest_priority_and_end_with_their_thread() -> None:
    seen = []

    def run() -> None:
        _import(["colorsys"])
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert "colorsys" in sys.modules and seen == [min(own + 19, 19)]


def test_without_a_spare_below_programs_start_as_usual() -> None:
    below = _SpareBelow(None)
    below.look()
    assert not below.is_there and not below.is_awaited
    assert below.take([ENGINE.module, "inflight: engine", "3"], [3], {}) is None


def test_each_spare_is_found_by_its_title_and_does_not_import_its_program() -> None:
    """A program that is imported first and then run would have two copies of its classes."""
    assert {MODEL.title: MODEL, ENGINE.title: ENGINE} == PROGRAMS and MODEL.below is ENGINE
    for program in (MODEL, ENGINE):
        code = (
            f"import importlib, sys; [importlib.import_module(each) for each in {program.imports}]; print(*sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert program.module not in done.stdout.split()
