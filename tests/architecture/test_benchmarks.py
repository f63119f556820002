"""The rooms of `benchmarks/`: a command is found by its short name in whichever room it is, and all else takes full names."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import benchmarks
from tests.architecture.source import PACKAGE, ROOT, Package, SourceFile

NAME = "benchmarks"
OWN_NAMES = {"compare", "gpu", "kv_tiers"}  # rooms that stand in their commands' names
MAIN = '__name__ == "__main__"'
COMMAND = re.compile(rf"python -m ({NAME}\.[\w.]*\w)")


def short_names(package: Package) -> dict[str, SourceFile]:
    """`benchmarks.latency` -> serving/latency.py, for each file of a room whose files have short names."""
    return {
        f"{NAME}.{file.module.rpartition('.')[2]}": file
        for file in package.files
        if file.room in benchmarks.ROOMS and not file.is_package
    }


def uses_of_short_names(package: Package, short: dict[str, SourceFile]) -> list[str]:
    """Imports by a short name, and strings that begin with one, as the name of a class for another process does."""
    package.by_module |= short  # so that `from benchmarks import latency` names a module
    found = []
    for file in package.files:
        nodes = ast.walk(file.tree) if f"{NAME}." in file.text else ()
        strings = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        named = [(each.module, each.line) for each in package.imports(file)]
        named += [(match[0], each.lineno) for each in strings if (match := re.match(rf"{NAME}\.\w+", str(each.value)))]
        found += [
            f"{file.package}/{file.path}:{line}: {name} is {short[name].module}"
            for name, line in named
            if name in short
        ]
    return found


def commands(paths: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    for path in paths:
        for name in COMMAND.findall(path.read_text(encoding="utf-8")):
            if name.islower():  # not NAME, which stands for any
                yield path, name


def is_command(name: str) -> bool:
    """Whether `python -m name` finds a program."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    return spec is not None and spec.origin is not None and MAIN in Path(spec.origin).read_text(encoding="utf-8")


def test_every_file_is_in_a_room_that_says_its_question_and_has_one_short_name() -> None:
    package = Package(ROOT / NAME, NAME)
    assert {file.room for file in package.files} == {"", *benchmarks.ROOMS, *OWN_NAMES}
    for room in package.rooms:
        assert ast.get_docstring(package.by_module[f"{NAME}.{room}"].tree), room
    files = [file for file in package.files if file.room in benchmarks.ROOMS and not file.is_package]
    short = short_names(package)
    assert len(short) == len(files), "two rooms have a file of the same name"
    assert not {name.rpartition(".")[2] for name in short} & package.rooms, "a file has the name of a room"


def test_short_names_are_for_the_command_line_only() -> None:
    short = short_names(Package(ROOT / NAME, NAME))
    for name in (PACKAGE, NAME, "tests", "scripts"):
        assert uses_of_short_names(Package(ROOT / name, name), short) == []


@pytest.mark.parametrize(
    "text",
    [
        "import benchmarks.latency",
        "from benchmarks import latency",
        "from benchmarks.latency import main",
        'WORKER = "benchmarks.latency:Worker"',
        'WORKER = f"benchmarks.latency:{name}"',
    ],
)
def test_a_short_name_is_found(tmp_path: Path, text: str) -> None:
    (tmp_path / "serving").mkdir()
    (tmp_path / "serving" / "latency.py").write_text("")
    (tmp_path / "serving" / "other.py").write_text(text)
    package = Package(tmp_path, NAME)
    problem = "benchmarks/serving/other.py:1: benchmarks.latency is benchmarks.serving.latency"
    assert uses_of_short_names(package, short_names(package)) == [problem]
    (tmp_path / "serving" / "other.py").write_text(text.replace("benchmarks", "benchmarks.serving"))
    assert uses_of_short_names(Package(tmp_path, NAME), short_names(package)) == []


def test_every_command_that_a_page_or_a_docstring_names_is_found() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/*.md"), *ROOT.glob(f"{NAME}/**/*.py")]
    named = set(commands(pages))
    assert len(named) > 50
    assert [f"{path.relative_to(ROOT)}: {name}" for path, name in sorted(named) if not is_command(name)] == []
    assert not is_command(f"{NAME}.report"), "it has no main"
    assert not is_command(f"{NAME}.no_such_command")


def test_a_command_says_its_short_name() -> None:
    for name, file in short_names(Package(ROOT / NAME, NAME)).items():
        assert MAIN not in file.text or f"python -m {name}" in (ast.get_docstring(file.tree) or ""), file.path
