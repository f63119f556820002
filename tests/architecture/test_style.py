"""What of the style can be counted: the size of files and functions, docstrings, and names that must not appear."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.architecture.source import LOAD_GENERATOR, PACKAGE, ROOT, Package, SourceFile, dotted_name, write_package

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 80  # from `def` to the last line, docstring and blank lines too

# "path" or "path::function" -> its own limit; with the date and the reason beside it
EXCEPTIONS: dict[str, int] = {}

PRINTING_ROOMS = frozenset({"entrypoints"})
PICKLES = frozenset({"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"})


def style_problems(package: Package) -> list[str]:
    found = []
    for file in package.files:
        found += size_problems(file)
        if file.text.strip() or not file.is_package:
            found += [] if ast.get_docstring(file.tree) else [f"{file.path}: has no module docstring"]
        found += [
            f"{file.path}:{imported.line}: {imported.module} runs code from bytes and is imported nowhere"
            for imported in package.imports(file)
            if imported.top in PICKLES
        ]
        found += call_problems(file)
    return found


def size_problems(file: SourceFile) -> list[str]:
    found = []
    num_lines = len(file.text.splitlines())
    limit = EXCEPTIONS.get(file.path, MAX_FILE_LINES)
    if num_lines > limit:
        found.append(f"{file.path}: {num_lines} lines, the limit is {limit}: it holds two ideas")
    for node in ast.walk(file.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            num_lines = node.end_lineno - node.lineno + 1
            limit = EXCEPTIONS.get(f"{file.path}::{node.name}", MAX_FUNCTION_LINES)
            if num_lines > limit:
                found.append(f"{file.path}:{node.lineno}: {node.name} has {num_lines} lines, the limit is {limit}")
    return found


def call_problems(file: SourceFile) -> list[str]:
    found = []
    for node in ast.walk(file.tree):
        if not isinstance(node, ast.Call):
            continue
        called = dotted_name(node.func)
        if called == "print" and file.room not in PRINTING_ROOMS:
            found.append(f"{file.path}:{node.lineno}: print() belongs to {', '.join(sorted(PRINTING_ROOMS))}")
        if (
            called.endswith(".get")
            and "SimpleQueue" in file.text
            and {each.arg for each in node.keywords} & {"timeout"}
        ):
            found.append(f"{file.path}:{node.lineno}: SimpleQueue.get(timeout=) can wait for ever: use queue.Queue")
        if called == "torch.load":
            found.append(f"{file.path}:{node.lineno}: torch.load reads pickles; weights are safetensors")
    return found


def test_the_source_keeps_to_the_style() -> None:
    for name in (PACKAGE, LOAD_GENERATOR):
        assert style_problems(Package(ROOT / name, name)) == []


def test_every_exception_is_needed() -> None:
    by_path = {file.path: file for file in Package(ROOT / PACKAGE).files}
    for name, limit in EXCEPTIONS.items():
        path, _, function = name.partition("::")
        assert path in by_path, f"{name} does not exist any more"
        assert limit > (MAX_FUNCTION_LINES if function else MAX_FILE_LINES)


LONG_FUNCTION = '"""x."""\ndef f():\n' + "    x = 1\n" * MAX_FUNCTION_LINES


@pytest.mark.parametrize(
    ("path", "text", "problem"),
    [
        ("engine/core/engine_core.py", '"""x."""\n' + "x = 1\n" * MAX_FILE_LINES, "451 lines, the limit is 450"),
        ("engine/core/engine_core.py", LONG_FUNCTION, "f has 81 lines, the limit is 80"),
        ("engine/core/engine_core.py", "x = 1\n", "has no module docstring"),
        ("engine/core/engine_core.py", "", "has no module docstring"),
        ("engine/__init__.py", "x = 1\n", "has no module docstring"),
        ("engine/core/engine_core.py", '"""x."""\nprint("x")\n', "print() belongs to"),
        ("engine/core/engine_core.py", '"""x."""\ndef f():\n    import pickle\n', "pickle runs code"),
        ("engine/core/engine_core.py", '"""x."""\nfrom cloudpickle import dumps\n', "cloudpickle runs code"),
        (
            "engine/loop.py",
            '"""x."""\nfrom queue import SimpleQueue\nSimpleQueue().get(timeout=1)\n',
            "use queue.Queue",
        ),
        ("model_loader/load.py", '"""x."""\nimport torch\ntorch.load("w.bin")\n', "torch.load reads pickles"),
    ],
)
def test_a_breach_is_found(tmp_path: Path, path: str, text: str, problem: str) -> None:
    found = style_problems(write_package(tmp_path, {path: text}))
    assert len(found) == 1
    assert problem in found[0]


def test_what_is_within_the_limits_passes(tmp_path: Path) -> None:
    files = {
        "engine/__init__.py": "",
        "engine/core/engine_core.py": '"""x."""\n' + "x = 1\n" * (MAX_FILE_LINES - 1),
        "engine/loop.py": LONG_FUNCTION.removesuffix("    x = 1\n"),
        "entrypoints/cli.py": '"""x."""\nprint("x")\n',
    }
    assert style_problems(write_package(tmp_path, files)) == []
