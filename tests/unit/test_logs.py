"""Log lines: their time, their JSON, and that nothing quoted in one can look like another."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from inflight import envs, logs
from inflight.entrypoints.cli.command import tell
from inflight.errors import ConfigError
from inflight.logs import JsonFormatter, TextFormatter
from inflight.processes.child_process import child_environment
from tests.support.python_process import PythonProcess, run_python

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00"


def record(message: object, *args: object, error: BaseException | None = None) -> logging.LogRecord:
    info = None if error is None else (type(error), error, error.__traceback__)
    return logging.LogRecord("inflight.engine", logging.WARNING, __file__, 1, message, args, info)


def failed(text: str) -> BaseException:
    try:
        raise ValueError(text)
    except ValueError as error:
        return error


@contextlib.contextmanager
def bare_root() -> Iterator[tuple[logging.Logger, io.StringIO]]:
    """The root logger without the handlers of pytest, which come back, and what is written to stderr."""
    root = logging.getLogger()
    kept, stderr = list(root.handlers), io.StringIO()
    root.handlers.clear()
    try:
        with contextlib.redirect_stderr(stderr):
            yield root, stderr
    finally:
        root.handlers[:] = kept
        logging.captureWarnings(False)


def test_a_line_of_text() -> None:
    line = TextFormatter("engine").format(record("%d requests", 3))
    assert re.fullmatch(f"{TIME} WARNING \\[engine\\] inflight.engine: 3 requests", line)
    assert TextFormatter(has_time=False).format(record("x")) == "WARNING inflight.engine: x"


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029"])
def test_what_an_entry_quotes_is_no_other_entry(end: str) -> None:
    text = f"a{end}2026-11-28T00:00:00.000+00:00 ERROR inflight: all is lost"
    for line in (
        TextFormatter().format(record("%s", text)),
        TextFormatter().format(record("failed", error=failed(text))),
    ):
        first, *others = line.splitlines()
        assert re.match(TIME, first) and all(other.startswith("    ") for other in others)
    (line,) = JsonFormatter("engine").format(record("%s", text)).splitlines()
    assert json.loads(line)["message"] == text


def test_a_terminal_is_not_controlled() -> None:
    assert (
        TextFormatter(has_time=False).format(record("\x1b[2J\x07\x9b31m\tü")).endswith(r": \x1b[2J\x07\x9b31m" + "\tü")
    )


def test_a_line_of_json() -> None:
    entry = json.loads(JsonFormatter("front end 0").format(record("failed: %s", "ä", error=failed("why"))))
    assert re.fullmatch(TIME, entry.pop("time"))
    assert entry.pop("exception").endswith("ValueError: why")
    assert entry == {
        "level": "WARNING", "process": "front end 0", "logger": "inflight.engine", "message": "failed: ä",
    }  # fmt: skip
    assert "exception" not in json.loads(JsonFormatter("x").format(record("fine")))


@pytest.mark.parametrize("name", ["text", "json"])
def test_a_process_writes_its_messages_and_those_of_libraries(name: str) -> None:
    with bare_root() as (root, stderr):
        logs.configure("engine", "text")
        logs.configure("spare", name)
        assert len(root.handlers) == 1, "a later call replaces an earlier one"
        assert logs.is_json() == (name == "json")
        for logger in ("inflight.x", "some_library", "py.warnings"):
            logging.getLogger(logger).error("one")
    lines = stderr.getvalue().splitlines()
    assert len(lines) == 3 and all("spare" in line for line in lines)
    if name == "json":
        assert [json.loads(line)["logger"] for line in lines] == ["inflight.x", "some_library", "py.warnings"]


def test_handlers_of_the_users_program_stay() -> None:
    theirs = logging.NullHandler()
    with bare_root() as (root, _):
        root.addHandler(theirs)
        logs.configure("", "json")
        assert root.handlers == [theirs] and not logs.is_json()
        logs.configure("engine", "json", replaces_all=True)
        assert theirs not in root.handlers and logs.is_json()


def test_the_journal_adds_the_time_itself() -> None:
    read, write = os.pipe()
    try:
        status = os.fstat(write)
        journal = {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
        assert logs.is_journal(journal, write)
        assert not logs.is_journal({}, write)
        assert not logs.is_journal({"JOURNAL_STREAM": "1:2"}, write), "stderr was redirected to a file"
    finally:
        os.close(read)
        os.close(write)
    assert not logs.is_journal(journal, write), "a closed descriptor"


def test_the_format_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, is_json in (("json", True), ("", False), ("text", False)):
        monkeypatch.setenv("INFLIGHT_LOG_FORMAT", value)
        with bare_root():
            logs.configure("engine")
            assert logs.is_json() == is_json
    monkeypatch.setenv("INFLIGHT_LOG_FORMAT", "xml")
    with pytest.raises(ConfigError, match=r"INFLIGHT_LOG_FORMAT='xml' .*text, json"):
        envs.log_format()


def test_processes_that_this_one_starts_write_in_the_same_format() -> None:
    for log_format, expected in (("json", "json"), ("text", None)):
        with bare_root():
            logs.configure("", log_format)
            assert child_environment({}, []).get("INFLIGHT_LOG_FORMAT") == expected


def test_lines_of_the_command_itself_are_entries_of_a_log_in_json() -> None:
    with bare_root() as (_, stderr):
        tell("warning", "a")
        logs.configure("", "json")
        for kind in ("note", "warning", "error"):
            tell(kind, "b")
    first, *others = stderr.getvalue().splitlines()
    assert first == "warning: a"
    assert [(json.loads(line)["level"], json.loads(line)["message"]) for line in others] == [
        ("INFO", "b"), ("WARNING", "b"), ("ERROR", "b"),
    ]  # fmt: skip


def test_a_process_ends_at_once_and_its_texts_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(logs.os, "_exit", done.append)
    monkeypatch.setattr(logs.logging, "shutdown", lambda: done.append("log"))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(flush=lambda: done.append("stdout")))
    logs.exit_now(7)
    assert done == ["log", "stdout", 7]


# A process that logs more than a pipe and the queue hold. Its stderr is read, if at all, after it has said that it goes on.
_LOGS_MUCH = """
import logging, sys, threading
from inflight.processes.child_process import name_process
name_process("inflight: engine")
for number in range(12_000):
    logging.getLogger("inflight.x").warning("line %d", number)
thread = threading.Thread(target=lambda: 1 / 0, name="a-thread")
thread.start()
thread.join()
print("goes on", flush=True)
if sys.stdin.readline() == "read\\n":
    logging.getLogger().handlers[0].flush()
    sys.stdin.readline()
    logging.getLogger("inflight.x").warning("the last one")
"""


@contextlib.contextmanager
def much_logged() -> Iterator[subprocess.Popen[str]]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    popen = PythonProcess([sys.executable, "-c", _LOGS_MUCH], text=True, **pipes)
    try:
        assert popen.stdout is not None and popen.stdout.readline() == "goes on\n"
        yield popen
    finally:
        popen.kill()
        popen.wait()
        for stream in (popen.stdin, popen.stdout, popen.stderr):
            assert stream is not None
            stream.close()


def test_a_process_whose_log_nobody_reads_goes_on_and_ends() -> None:
    with much_logged() as popen:
        assert popen.stdin is not None
        popen.stdin.write("end\n")
        popen.stdin.close()
        assert popen.wait(300) == 0


def test_lines_that_did_not_fit_are_counted_in_the_log() -> None:
    with much_logged() as popen:
        assert popen.stdin is not None and popen.stderr is not None
        popen.stdin.write("read\n")
        popen.stdin.flush()
        seen = []
        for line in popen.stderr:
            seen.append(line)
            if " were dropped" in line:
                break
        popen.stdin.write("more\n")
        popen.stdin.flush()
        assert "the last one" in popen.stderr.readline()
    written = [int(line.rpartition(" ")[2]) for line in seen if "inflight.x: line" in line]
    assert written == list(range(len(written))), "in the order in which they came"
    match = re.search(r"WARNING \[engine\] inflight.logs: (\d+) lines of the log were dropped", seen[-1])
    # the rest, the error of the thread, and the first report
    assert match is not None and int(match[1]) == 12_000 - len(written) + 2


def test_an_error_that_nothing_handles_is_an_entry_of_the_log() -> None:
    script = "from inflight.processes.child_process import name_process as n; n('inflight: engine'); "
    for defect, said in (
        ("1 / 0", "ends this process"),
        (
            "import threading; threading.Thread(target=lambda: 1 / 0, name='a-thread').start()",
            "ends the thread a-thread",
        ),
    ):
        done = run_python([sys.executable, "-c", script + defect], capture_output=True, text=True)
        first, *others = done.stderr.splitlines()
        assert re.match(rf"{TIME} CRITICAL \[engine\] inflight.logs: an error that nothing handles {said}$", first)
        assert all(line.startswith("    ") for line in others) and "ZeroDivisionError" in others[-1]


def test_lines_of_the_command_itself_come_after_the_entries_so_far() -> None:
    script = (
        "import logging; from inflight import logs; from inflight.entrypoints.cli.command import tell; logs.configure('');"
        "[logging.getLogger('x').warning('entry') for _ in range(100)]; tell('error', 'text')"
    )
    lines = run_python([sys.executable, "-c", script], capture_output=True, text=True).stderr.splitlines()
    assert len(lines) == 101 and lines[-1] == "error: text"


def test_the_same_traceback_again_is_one_line() -> None:
    read, write = os.pipe()
    handler = logs.LogHandler(write)
    handler.setFormatter(TextFormatter(has_time=False))
    for created, text in ((0.0, "one"), (1.0, "two\nlines"), (9.9, "three"), (10.1, "four")):
        entry = record("failed: %s", "x", error=failed(text))
        entry.created = created
        handler.emit(entry)
    handler.emit(record("other", error=KeyError("five")))
    handler.close()
    os.close(write)
    with open(read) as file:
        lines = file.read().splitlines()
    short = "WARNING inflight.engine: failed: x: ValueError: "
    assert [line for line in lines if "same traceback as before" in line] == [
        f"{short}two", "    lines (same traceback as before)", f"{short}three (same traceback as before)",
    ][1:]  # fmt: skip
    assert sum("Traceback" in line for line in lines) == 2 and lines[-1] == "    KeyError: 'five'"
