"""The log of every process: how its lines look, and who writes them to stderr. They are text for people, or a JSON object on
each line for programs (INFLIGHT_LOG_FORMAT). No thread that logs waits for a slow reader of stderr: line_writer.py.

A line of text has the time, unless stderr is the journal of systemd, which adds its own. The first line of an entry begins in
the first column, and all others are indented, so nothing that an entry quotes can look like another entry. Control characters
are escaped, so nothing that it quotes can move the cursor of a terminal.
"""

import contextlib
import copy
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, NoReturn

from inflight import envs
from inflight.line_writer import LineWriter

logger = logging.getLogger(__name__)

# A traceback is left out if the same one was logged within this time: a client may cause an error again and again.
REPEAT_SECONDS = 10.0
_MAX_KINDS = 64  # of tracebacks that are remembered
# How long the end of a process, or a line of the command itself, waits until the log is written.
FLUSH_SECONDS = 1.0
_STDERR = 2
# Control characters but tab and line feed, and what some readers take for the end of a line.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


class TextFormatter(logging.Formatter):
    """
    Args:
        process: the name of this process in each line, such as "engine". "" for none.
        has_time: whether each line begins with the time.
    """

    def __init__(self, process: str = "", *, has_time: bool = True) -> None:
        super().__init__(f"%(levelname)s {f'[{process}] ' if process else ''}%(name)s: %(message)s")
        self._has_time = has_time

    def format(self, record: logging.LogRecord) -> str:
        text = escape_controls(super().format(record)).replace("\n", "\n    ")
        return f"{time_of(record)} {text}" if self._has_time else text


class JsonFormatter(logging.Formatter):
    """Makes an object with time, level, process, logger and message. "exception" is the traceback, if there is one."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {  # Any: JSON
            "time": time_of(record),
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        exception = self.formatException(record.exc_info) if record.exc_info else record.exc_text
        parts = [part for part in (exception, record.stack_info) if part]
        return json.dumps({**entry, "exception": "\n".join(parts)} if parts else entry)


class LogHandler(logging.Handler):
    """Writes log lines to a descriptor, in a thread of its own."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._lines = LineWriter(fd, _report_dropped)
        self._is_read = True  # whether the last `flush` was in time
        self._last_traces: dict[tuple[object, ...], float] = {}  # kind of error and its place -> when it was logged

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(self._without_repeated_traceback(record))
        except Exception:  # a log call whose arguments do not fit its text
            self.handleError(record)
        else:
            self._lines.put(f"{text}\n")

    def _without_repeated_traceback(self, record: logging.LogRecord) -> logging.LogRecord:
        if not record.exc_info or record.exc_info[0] is None:
            return record
        kind, error, trace = record.exc_info
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        place = None if trace is None else (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        last = self._last_traces.get(key := (record.name, kind, place))
        if last is None or not 0 <= record.created - last < REPEAT_SECONDS:
            if len(self._last_traces) >= _MAX_KINDS:
                self._last_traces.clear()
            self._last_traces[key] = record.created
            return record
        short = copy.copy(record)
        short.exc_info = short.exc_text = None
        short.msg = "%s: %s: %.200s (same traceback as before)"
        short.args = (record.getMessage(), kind.__name__, error)
        return short

    def write(self, text: str) -> None:
        """Write a line that is not an entry of the log."""
        self._lines.put(f"{text}\n")

    def flush(self) -> None:
        self._is_read = self._lines.flush(FLUSH_SECONDS)

    def close(self) -> None:
        super().close()
        self._lines.close(FLUSH_SECONDS if self._is_read else 0.0)


def escape_controls(text: str) -> str:
    """The text with \\x1b, for example, in place of the character that it names: what controls a terminal. Tabs and line feeds
    stay."""
    return _CONTROLS.sub(_escaped, text)


def time_of(record: logging.LogRecord) -> str:
    """The time of a log line in the same form as in the access log."""
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def configure(process: str, log_format: str | None = None, *, replaces_all: bool = False) -> None:
    """Write the log messages and warnings of all libraries in this process to stderr. A later call replaces an earlier one.

    Args:
        process: the name of this process, "" for the command that the user started.
        log_format: "text" or "json"; by default INFLIGHT_LOG_FORMAT.
        replaces_all: remove handlers that others have installed. By default nothing is done if there are any.

    Raises:
        ConfigError: INFLIGHT_LOG_FORMAT is wrong.
    """
    wants_json = (log_format or envs.log_format()) == "json"
    root = logging.getLogger()
    others = [handler for handler in root.handlers if not isinstance(handler.formatter, (TextFormatter, JsonFormatter))]
    if others and not replaces_all:
        return
    has_time = not is_journal(os.environ, _STDERR)
    formatter = JsonFormatter(process or "main") if wants_json else TextFormatter(process, has_time=has_time)
    kept = None if others else _own_handler()
    handler = kept or _stderr_handler()
    handler.setFormatter(formatter)
    if kept is None:
        logging.basicConfig(handlers=[handler], force=True)
    if replaces_all:
        sys.excepthook = _log_uncaught
        threading.excepthook = _log_uncaught_in_thread
    logging.captureWarnings(True)


def write_line(text: str) -> None:
    """Write a line to stderr that is not an entry of the log, after the entries so far. Control characters are escaped."""
    text = escape_controls(text)
    handler = _own_handler()
    if handler is None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    else:
        handler.write(text)
        handler.flush()


def exit_now(code: int) -> NoReturn:
    """End the process without waiting for threads that still run. First write the log and stdout."""
    logging.shutdown()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


def is_json() -> bool:
    """Whether the log of this process is JSON."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def is_configured() -> bool:
    """Whether `configure` has set the format of the log of this process."""
    return any(
        isinstance(handler.formatter, (TextFormatter, JsonFormatter)) for handler in logging.getLogger().handlers
    )


def is_journal(environment: Mapping[str, str], descriptor: int) -> bool:
    """Whether a descriptor is connected to the journal. systemd gives the device and the inode of its socket in JOURNAL_STREAM:
    https://www.freedesktop.org/software/systemd/man/latest/systemd.exec.html"""
    try:
        status = os.fstat(descriptor)
    except OSError:  # the descriptor is closed
        return False
    return environment.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def _own_handler() -> LogHandler | None:
    return next((handler for handler in logging.getLogger().handlers if isinstance(handler, LogHandler)), None)


def _stderr_handler() -> logging.Handler:
    try:
        return LogHandler(sys.stderr.fileno())
    except (
        OSError,
        AttributeError,
        ValueError,
    ):  # no stream of the system: None, or a stream in memory, which never waits
        return logging.StreamHandler()


def _report_dropped(num_dropped: int) -> None:
    logger.warning(
        "%d lines of the log were dropped so far: stderr cannot be written fast enough or at all", num_dropped
    )


# In a process that serves, an uncaught error is an entry of the log. Python itself would write it to stderr, and would wait.


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logger.critical("an error that nothing handles ends this process", exc_info=(kind, error, trace))


def _log_uncaught_in_thread(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_value is not None and not isinstance(arguments.exc_value, SystemExit):
        name = "?" if arguments.thread is None else arguments.thread.name
        info = (arguments.exc_type, arguments.exc_value, arguments.exc_traceback)
        logger.critical("an error that nothing handles ends the thread %s", name, exc_info=info)


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
