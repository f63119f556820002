#!/usr/bin/env python3
"""Writes the tables of docs/from-vllm.md: the flags of other engines in inflight/entrypoints/cli/foreign_flags.py."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from inflight.entrypoints.cli.foreign_flags import NO_EFFECT, REFUSED, SAME, SAME_VALUES  # noqa: E402

PAGE = ROOT / "docs" / "from-vllm.md"
BEGIN, END = "<!-- written by scripts/flags.py -->\n", "<!-- end -->\n"


def tables() -> str:
    """The part of the page between `BEGIN` and `END`."""
    same = {**SAME, **{theirs: f"{theirs.split()[0]} {ours}" for theirs, ours in SAME_VALUES.items()}}
    lines = ["\n### Other names\n", "| vLLM | here |", "|---|---|"]
    lines += [f"| `{theirs.removesuffix('[]')}` | `{ours}` |" for theirs, ours in same.items()]
    for title, what, table in (
        ("Flags without effect", "why they have none", NO_EFFECT),
        ("Refused flags", "why, or what to use", REFUSED),
    ):
        lines += [f"\n### {title}\n", f"| {what} | flags |", "|---|---|"]
        lines += [f"| {reason} | {_list(flags)} |" for reason, flags in table.items()]
    return "\n".join(lines) + "\n\n"


def _list(flags: str) -> str:
    return ", ".join(f"`{flag.rstrip('=+')}`" for flag in flags.split())


def with_tables(page: str) -> str:
    """The page with the tables of today.

    Raises:
        ValueError: the page does not have the two marks.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} lacks {BEGIN.strip()} or {END.strip()}")
    return before + begin + tables() + end + after


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
