"""A module asks for later evaluation of its annotations only if it must: `from __future__ import annotations` is no habit.

It must if an annotation names something that is defined further below or is imported for type checkers only, or if a function
within a function has annotations, which would be evaluated at each call.
"""

import ast
import builtins
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.architecture.source import LOAD_GENERATOR, PACKAGE, ROOT, Package, SourceFile, write_package

# The digest that nodes compare has the annotations of all messages as texts, which are the same in all versions of Python.
MESSAGES = (
    *(f"interface/{name}.py" for name in "kv_cache messages request serving start_up statistics step worker".split()),
    *(f"config/{name}.py" for name in "architecture engine fault_tolerance kv_events ranks".split()),
    *("sampling_params.py", "structured_outputs_params.py", "timeline.py"),
)
# another content of this file means that the kernels must be built again
WITHOUT_CHANGE = ("kernels/cpu/compile_flags.py",)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def asks_without_need(file: SourceFile) -> bool:
    asks = any(isinstance(each, ast.ImportFrom) and each.module == "__future__" for each in file.tree.body)
    return asks and file.path not in (*MESSAGES, *WITHOUT_CHANGE) and not is_needed(file.tree.body, set(dir(builtins)))


def is_needed(body: Iterable[ast.stmt], known: set[str]) -> bool:
    """`known`: the names that are defined before `body`. Those that it defines are added."""
    for each in body:
        if isinstance(each, ast.If) and ast.unparse(each.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(each, Function):
            inner = (node for node in ast.walk(each) if node is not each)
            needed = not are_known(annotations_of(each), known) or any(map(annotations_of, inner))
        elif isinstance(each, ast.ClassDef):
            needed = is_needed(each.body, {*known})
        elif isinstance(each, ast.AnnAssign):
            needed = not are_known([each.annotation], known)
        else:
            inner_bodies = (getattr(each, name, []) for name in ("body", "orelse", "finalbody"))
            needed = any(is_needed(inner_body, known) for inner_body in inner_bodies)
        if needed:
            return True
        known |= names_made_by(each)
    return False


def annotations_of(node: ast.AST) -> list[ast.expr]:
    """The annotations of a function's parameters and result, and those in the body of a class."""
    if isinstance(node, ast.ClassDef):
        return [each.annotation for each in node.body if isinstance(each, ast.AnnAssign)]
    if not isinstance(node, Function):
        return []
    given = node.args
    parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
    return [each for each in (*(parameter.annotation for parameter in parameters), node.returns) if each is not None]


def are_known(annotations: Iterable[ast.expr], known: set[str]) -> bool:
    nodes = (node for annotation in annotations for node in ast.walk(annotation))
    return {node.id for node in nodes if isinstance(node, ast.Name)} <= known


def names_made_by(statement: ast.stmt) -> set[str]:
    if isinstance(statement, Function | ast.ClassDef):
        return {statement.name}
    made = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    imports = [node for node in ast.walk(statement) if isinstance(node, ast.Import | ast.ImportFrom)]
    return made | {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}


def test_no_module_asks_without_need() -> None:
    files = [file for name in (PACKAGE, LOAD_GENERATOR) for file in Package(ROOT / name, name).files]
    assert [file.path for file in files if asks_without_need(file)] == []
    assert any(is_needed(file.tree.body, set(dir(builtins))) for file in files)


@pytest.mark.parametrize(
    ("text", "without_need"),
    [
        ("import os\ndef f(x: os.PathLike[str]) -> int: ...", True),
        ("class A:\n    x: int\n    def f(self) -> None: ...\ndef f() -> A: ...", True),
        ("if True:\n    from os import stat_result\ndef f() -> stat_result: ...", True),
        ("class A:\n    def f(self) -> A: ...", False),
        ("def f() -> A: ...\nclass A: ...", False),
        ("x: A\nclass A: ...", False),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import os\ndef f() -> os.PathLike: ...", False),
        ("def f() -> None:\n    def g(x: int): ...", False),
        ("def f() -> None:\n    class A:\n        x: int", False),
    ],
)
def test_need(tmp_path: Path, text: str, without_need: bool) -> None:
    (file,) = write_package(tmp_path, {"engine/a.py": f"from __future__ import annotations\n{text}\n"}).files
    assert asks_without_need(file) is without_need
