"""What `scripts/core.py` counts and prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.core import ROOT, core_of, densest, main, measure, room_or_kind, table
from scripts.source_size import SourceSize, code_lines
from tests.architecture.source import PACKAGE, write_package

TEXT = '''"""A module.

More."""

# a comment
RATE = 1


def swap(x, y):
    """One line."""
    a, b = x, y

    return [
        b, a
    ]
'''


def test_what_is_counted() -> None:
    assert code_lines(TEXT) == {6, 9, 11, 13, 14, 15}
    size = SourceSize.of(TEXT)
    # docstrings: 2 statements, 2 expressions; RATE = 1: 3; def: 1; a, b = x, y: 7; return [b, a]: 4
    assert size == SourceSize(files=1, code=6, nodes=19, tuple_assignments=1)
    assert (size.size, size.nodes_a_line, size.tuple_assignments_in_1000_lines) == (4, 19 / 6, 1000 / 6)


@pytest.mark.parametrize(
    ("text", "count"), [("a, b = f()", 0), ("a = x, y", 0), ("a = b = 1", 0), ("a, (b, c) = x, y", 1), ("a += x, y", 0)]
)
def test_tuple_assignments(text: str, count: int) -> None:
    assert SourceSize.of(text).tuple_assignments == count


def test_the_size_does_not_depend_on_lines() -> None:
    assert SourceSize.of("total = f(\n    1,\n    2,\n)").size == SourceSize.of("total = f(1, 2)").size


def test_an_empty_file_has_no_density() -> None:
    empty = SourceSize.of("")
    assert (empty.size, empty.nodes_a_line, empty.tuple_assignments_in_1000_lines) == (0, 0, 0)


def test_the_table_divides_core_and_edges(tmp_path: Path) -> None:
    package = write_package(
        tmp_path,
        {
            "scheduler/plan.py": "x = 1\ny = f(x, x + 1)",
            "scheduler/grammars.py": "x = 1",
            "parsers/a.py": "x = 1",
            "parsers/b.py": "x, y = 1, 2",
        },
    )
    files = measure(package)
    assert core_of(files) == files["scheduler/plan.py"]
    lines = [line.split() for line in table(files, room_or_kind).splitlines()]
    assert lines == [
        ["files", "size", "code", "nodes", "tuples"],
        ["scheduler", "1", "2", "2", "5.50", "0.0"],
        ["core", "1", "2", "2", "5.50", "0.0"],
        ["grammars", "1", "1", "1", "3.00", "0.0"],
        ["parsers", "2", "2", "2", "5.00", "500.0"],
        ["edges", "3", "3", "3", "4.33", "333.3"],
        ["inflight", "4", "5", "5", "4.80", "200.0"],
    ]
    assert densest(package, 2) == ["scheduler/plan.py:2: 8: y = f(x, x + 1)", "parsers/b.py:1: 7: x, y = 1, 2"]


@pytest.mark.parametrize(("arguments", "code"), [([], 0), (["--files"], 0), (["--densest"], 0), (["--file"], 2)])
def test_the_command(arguments: list[str], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_package(tmp_path, {"parsers/a.py": "x = 1"})
    assert main(arguments, tmp_path / PACKAGE) == code
    printed = capsys.readouterr()
    assert ("usage" in printed.err) if code else ("parsers" in printed.out)


def test_the_command_is_started_by_its_path(tmp_path: Path) -> None:
    """tests/architecture/test_core.py counts the package."""
    command = [sys.executable, ROOT / "scripts" / "core.py", "--unknown"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "usage" in done.stderr
