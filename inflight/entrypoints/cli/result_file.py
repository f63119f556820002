"""`ResultFile`: the JSON-lines output of a run, from which the run can be resumed.

`ResultFile` opens and closes the file, and holds an advisory lock on it. Each row is written and flushed at once. So if the
process is killed, the file has whole rows, and at most one incomplete row at its end. When the file is opened again, the
incomplete row is removed, and the whole rows tell which input rows are done.
"""

import fcntl
import json
import os
import sys
from pathlib import Path
from typing import IO, Any, Self

from inflight.entrypoints.cli.rows import STANDARD_STREAM, InputRow, RowId
from inflight.entrypoints.json_lines import row_to_json
from inflight.errors import ConfigError


class ResultFile:
    """A context manager. If the path is "-", results go to standard output, and the run cannot be resumed."""

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        """
        Raises:
            ConfigError: the file cannot be written, another run writes to it, or it contains a line that is not a result.
        """
        self._done_ids: set[RowId] = set()
        self._done_rows: set[int] = set()  # the numbers of rows without an id
        self._is_stream = path == STANDARD_STREAM
        self._file: IO[bytes] = sys.stdout.buffer if self._is_stream else _open_locked(path)
        if not self._is_stream:
            try:
                if overwrite:
                    self._file.truncate(0)
                self._read_done(path)
            except BaseException:
                self._file.close()
                raise

    def is_done(self, row: InputRow) -> bool:
        if row.id is None:
            return row.number in self._done_rows
        return row.id in self._done_ids

    def write(self, result: dict[str, Any]) -> None:  # Any: JSON
        """Append one row, and hand it to the operating system at once."""
        self._file.write(row_to_json(result) + b"\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_stream:
            self._file.close()

    def _read_done(self, path: Path) -> None:
        """Read the results that the file already has, and truncate the file after the last whole row."""
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file, 1):
            result = _parse_result(line)
            if result is None and not line.endswith(b"\n"):
                break  # a killed run has left this incomplete row, so its input row is run again
            if result is None:
                raise ConfigError(
                    f"--output {path}, line {number}, is not a result of this command; choose another file, "
                    "or give --overwrite to delete what it holds"
                )
            end += len(line)
            if "id" in result:
                self._done_ids.add(result["id"])
            else:
                self._done_rows.add(result["row"])
            if not line.endswith(b"\n"):  # an editor has removed the last newline
                self._file.seek(end)
                self._file.write(b"\n")
                end += 1
                break
        self._file.truncate(end)
        self._file.seek(end)


def _parse_result(line: bytes) -> dict[str, Any] | None:  # Any: JSON
    try:
        result = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_result = (
        isinstance(result, dict) and isinstance(result.get("row"), int) and isinstance(result.get("id", ""), (str, int))
    )
    return result if is_result else None


def _open_locked(path: Path) -> IO[bytes]:
    try:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ConfigError(
            f"--output {path} is in use by another run; wait until that run ends, or choose another file"
        ) from error
    except OSError:  # this file system has no locks; if two runs write to the file, nobody notices
        pass
    return file
