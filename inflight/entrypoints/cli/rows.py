"""Reads the rows of a JSON-lines input file, one at a time, because the file may be larger than memory.

    {"id": optional, "prompt": text | "prompt_token_ids": [...] | "messages": [...], "tools": [...], "params": {...}}

A row's number is the number of its line, from 1. Empty lines count, but no row is made from them.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from inflight.entrypoints.whole_numbers import as_integers
from inflight.errors import ConfigError

STANDARD_STREAM = Path("-")

RowId = str | int


@dataclass(frozen=True, slots=True)
class InputRow:
    """One line of the input. `problem` says why the row cannot be run; it is empty if the line could be read."""

    number: int
    id: RowId | None
    fields: dict[str, Any]  # Any: JSON, checked where each field is used
    problem: str = ""


def open_input(path: Path) -> AbstractContextManager[IO[bytes]]:
    """Open the file, or standard input if the path is "-".

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        if path == STANDARD_STREAM:
            return nullcontext(sys.stdin.buffer)
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"--input {path} cannot be read: {error.strerror}") from error


def read_rows(lines: Iterable[bytes]) -> Iterator[InputRow]:
    """Parse line by line. For a wrong line, yield a row with a `problem` instead of raising an error."""
    rows_by_id: dict[RowId, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row = parse_row(number, line)
        if row.id is not None:
            first = rows_by_id.setdefault(row.id, number)
            if first != number:  # the wrong row gets no id, so that its result does not count as that of the first row
                row = InputRow(number, None, {}, f"row {first} has the id {row.id!r} already; give each row its own id")
        yield row


def parse_row(number: int, line: bytes) -> InputRow:
    try:
        fields = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        return InputRow(number, None, {}, f"the line is not valid JSON: {error}")
    if not isinstance(fields, dict):
        return InputRow(number, None, {}, f"the line is a {type(fields).__name__}, not a JSON object")
    row_id = as_integers(fields.pop("id", None))
    if row_id is not None and (isinstance(row_id, bool) or not isinstance(row_id, (str, int))):
        return InputRow(number, None, {}, f"id={row_id!r} is neither a string nor an integer")
    return InputRow(number, row_id, fields)


def count_rows(path: Path) -> int | None:
    """The number of rows, for a progress bar. None if the input is not a file, because then it can be read only once."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())
