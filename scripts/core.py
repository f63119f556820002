#!/usr/bin/env python3
"""Counts the core of inflight/, which one person must be able to read, and the edges, which are read one at a time.

    scripts/core.py             a line for each room of the core, for each kind of edge, and the sums
    scripts/core.py --files     a line for each file
    scripts/core.py --densest   the 40 lines with the most nodes: names are missing there

Which file belongs where is in tests/architecture/core_rooms.py. The columns:

    size    expressions and statements of the syntax tree, divided by 5: code in fewer lines has the same size
    code    lines without blank lines, comments and docstrings
    nodes   expressions and statements in a line of code, on average
    tuples  statements such as `a, b = x, y` in 1,000 lines of code
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.source_size import SourceSize  # noqa: E402
from tests.architecture.core_rooms import kind_of  # noqa: E402
from tests.architecture.source import PACKAGE, Package  # noqa: E402

NUM_DENSEST = 40


def measure(package: Package) -> dict[str, SourceSize]:
    """The size of each file, by its path below the package."""
    return {file.path: SourceSize.of(file.text) for file in package.files}


def core_of(files: Mapping[str, SourceSize]) -> SourceSize:
    return SourceSize.sum(size for path, size in files.items() if not kind_of(path))


def densest(package: Package, count: int) -> list[str]:
    """The lines with the most nodes: "path:line: nodes: text"."""
    found = []
    for file in package.files:
        starts = (node.lineno for node in ast.walk(file.tree) if isinstance(node, ast.expr | ast.stmt))
        lines = file.text.splitlines()
        for number, nodes in Counter(starts).items():
            found.append((nodes, f"{file.path}:{number}: {nodes}: {lines[number - 1].strip()}"))
    return [text for _, text in sorted(found, key=lambda each: -each[0])[:count]]


def table(files: Mapping[str, SourceSize], group: Callable[[str], str]) -> str:
    lines = [f"{'':48}{'files':>6}{'size':>8}{'code':>8}{'nodes':>7}{'tuples':>8}"]

    def add(name: str, size: SourceSize) -> None:
        density = f"{size.nodes_a_line:>7.2f}{size.tuple_assignments_in_1000_lines:>8.1f}"
        lines.append(f"{name:48}{size.files:>6}{size.size:>8,}{size.code:>8,}{density}")

    for is_core, title in ((True, "core"), (False, "edges")):
        listed = {path: size for path, size in files.items() if (kind_of(path) == "") == is_core}
        for each in sorted({group(path) for path in listed}):
            add(f"    {each}", SourceSize.sum(size for path, size in listed.items() if group(path) == each))
        add(title, SourceSize.sum(listed.values()))
    add(PACKAGE, SourceSize.sum(files.values()))
    return "\n".join(lines)


def room_or_kind(path: str) -> str:
    return kind_of(path) or path.split("/")[0]


def main(arguments: list[str], folder: Path = ROOT / PACKAGE) -> int:
    package = Package(folder)
    match arguments:
        case []:
            print(table(measure(package), room_or_kind))
        case ["--files"]:
            print(table(measure(package), str))
        case ["--densest"]:
            print("\n".join(densest(package, NUM_DENSEST)))
        case _:
            print("usage: scripts/core.py [--files | --densest]", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
