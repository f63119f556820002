"""How the log lines of every process look: text for people, or a JSON object on each line for programs (INFLIGHT_LOG_FORMAT).

A line of text has the time, unless stderr is the journal of systemd, which adds its own. The first line of an entry begins in
the first column, and all others are indented, so nothing that an entry quotes can look like another entry. Control characters
are escaped, so nothing that it quotes can move the cursor of a terminal.
"""

import json
import logging
import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from inflight import envs

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
        text = _CONTROLS.sub(_escaped, super().format(record)).replace("\n", "\n    ")
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
    handler = logging.StreamHandler()
    has_time = not is_journal(os.environ, _STDERR)
    handler.setFormatter(JsonFormatter(process or "main") if wants_json else TextFormatter(process, has_time=has_time))
    logging.basicConfig(handlers=[handler], force=True)
    logging.captureWarnings(True)


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


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
