"""A table in a page that is written from the code: which rows are missing in the page, and which are not of today."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def row_problems(page: Path, heading: Sequence[str], rows: Sequence[str]) -> str:
    """What to change in the page, so that it has a table with exactly these rows under these two lines. "" if it has it."""
    _, found, behind = page.read_text(encoding="utf-8").partition("\n".join([*heading, ""]))
    name = page.relative_to(ROOT) if page.is_relative_to(ROOT) else page.name
    if not found:
        return f"{name} has no table that begins with {heading[0]!r}"
    table = re.match(r"(?:\|.*\n?)*", behind)
    assert table is not None  # it also matches nothing
    written = table[0].splitlines()
    if written == list(rows):
        return ""
    missing = [row for row in rows if row not in written]
    old = [row for row in written if row not in rows]
    parts = [
        "\n".join([f"{name}: {what}:", *lines])
        for what, lines in (("add these rows", missing), ("remove these rows", old))
        if lines
    ]
    return "\n".join(parts) or f"{name}: the rows of the table are in another order, or twice"
