"""Whether a server ends with its terminal. tests/e2e/test_closed_terminal.py has real terminals."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from inflight.entrypoints.serve import terminal as terminal_module
from inflight.entrypoints.serve.terminal import ServerTerminal


@pytest.mark.parametrize(("had_one", "is_ignored"), [(True, False), (True, True), (False, False)])
def test_the_end_of_the_terminal_counts_unless_sighup_was_ignored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, had_one: bool, is_ignored: bool
) -> None:
    path = tmp_path / "tty"
    if had_one:
        path.touch()
    monkeypatch.setattr(terminal_module, "_OWN_TERMINAL", str(path))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    try:
        terminal = ServerTerminal()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert not terminal.was_closed
    path.unlink(missing_ok=True)
    assert terminal.was_closed == (had_one and not is_ignored)
