"""Whether a server ends with its terminal. tests/e2e/test_closed_terminal.py has real terminals."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from inflight.entrypoints.serve import terminal as terminal_module
from inflight.entrypoints.serve.terminal import ServerTerminal
from tests.support.kept_handler import kept_handler
from tests.unit.engine.serving.event_loop import run, until


@pytest.mark.parametrize(("had_one", "is_ignored"), [(True, False), (True, True), (False, False)])
def test_the_end_of_the_terminal_counts_unless_sighup_was_ignored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, had_one: bool, is_ignored: bool
) -> None:
    path = tmp_path / "tty"
    if had_one:
        path.touch()
    monkeypatch.setattr(terminal_module, "_OWN_TERMINAL", str(path))
    with kept_handler(signal.SIGHUP):
        signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
        terminal = ServerTerminal()
    assert not terminal.was_closed
    path.unlink(missing_ok=True)
    assert terminal.was_closed == (had_one and not is_ignored)


@pytest.mark.parametrize(
    ("was_closed", "has_files", "expected"), [(True, True, "end"), (False, True, "read"), (False, False, "goes on")]
)
def test_what_sighup_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, was_closed: bool, has_files: bool, expected: str
) -> None:
    async def test() -> None:
        terminal = ServerTerminal()
        done: list[str] = []
        terminal.on_hangup(lambda: done.append("end"), (lambda: done.append("read")) if has_files else None)
        signal.raise_signal(signal.SIGHUP)
        await until(lambda: bool(done or caplog.records))
        assert [*done, *caplog.messages] == [expected] or (not done and expected in caplog.messages[0])
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)

    caplog.set_level("INFO", "inflight")
    monkeypatch.setattr(ServerTerminal, "was_closed", was_closed)
    with kept_handler(signal.SIGHUP):
        run(test)
