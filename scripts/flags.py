#!/usr/bin/env python3
"""Writes the tables of docs/from-vllm.md: the flags of other engines in inflight/entrypoints/cli/foreign_flags.py, and their
environment variables in inflight/foreign_variables.py."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from inflight import foreign_variables  # noqa: E402
from inflight.entrypoints.cli.foreign_flags import NO_EFFECT, REFUSED, SAME, SAME_VALUES  # noqa: E402

PAGE = ROOT / "docs" / "from-vllm.md"
BEGIN, END = "<!-- written by scripts/flags.py -->\n", "<!-- end -->\n"
BEGIN_VARIABLES = "<!-- variables, written by scripts/flags.py -->\n"


def tables() -> str:
    """The part of the page about flags."""
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


def variable_tables() -> str:
    """The part of the page about environment variables."""
    others = {name: ours for name, ours in foreign_variables.OF_OTHER_SERVERS.items() if not name.startswith("VLLM_")}
    lines = ["\n### Variables with another name\n", "| vLLM | use here |", "|---|---|"]
    lines += [f"| `{theirs}` | {ours} |" for theirs, ours in foreign_variables.SAME.items()]
    lines += ["\n### Variables of other servers\n", "| variable | here |", "|---|---|"]
    lines += [f"| `{theirs}` | {ours} |" for theirs, ours in others.items()]
    refused: dict[str, list[str]] = {}
    for name, refusal in foreign_variables.REFUSED.items():
        refused.setdefault(refusal.reason, []).append(name)
    lines += [
        "\n### Variables with which a server does not start\n",
        "| why, and what to do | variables |",
        "|---|---|",
    ]
    lines += [f"| {reason} | {_list(' '.join(names))} |" for reason, names in refused.items()]
    lines += ["\n### Variables without effect\n", "| why they have none | variables |", "|---|---|"]
    lines += [f"| {reason} | {_list(names)} |" for reason, names in foreign_variables.NO_EFFECT.items()]
    return "\n".join(lines) + "\n\n"


def _list(flags: str) -> str:
    return ", ".join(f"`{flag.rstrip('=+')}`" for flag in flags.split())


def with_tables(page: str) -> str:
    """The page with the tables of today.

    Raises:
        ValueError: the page does not have the two marks.
    """
    for mark, text in ((BEGIN_VARIABLES, variable_tables()), (BEGIN, tables())):
        before, begin, rest = page.partition(mark)
        _, end, after = rest.partition(END)
        if not begin or not end:
            raise ValueError(f"{PAGE.name} lacks {mark.strip()} or {END.strip()}")
        page = before + begin + text + end + after
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
