"""The package's source as data: its files, their syntax trees and what they import. Shared by the architecture tests.

Nothing is executed: an import is seen wherever it stands, in a function and under `TYPE_CHECKING` too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "inflight"
LOAD_GENERATOR = "inflight_bench"


@dataclass(frozen=True)
class Import:
    module: str  # absolute, as far as it is known to be a module: "inflight.config.engine", "torch.nn.functional"
    line: int
    at_run_time: bool  # executed whenever the importing module is: not in a function, not under TYPE_CHECKING

    @property
    def top(self) -> str:
        return self.module.split(".")[0]


@dataclass(frozen=True)
class SourceFile:
    path: str  # relative to the package: "config/engine.py"
    text: str
    package: str = PACKAGE

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.path)

    @property
    def is_package(self) -> bool:
        return self.path.split("/")[-1] == "__init__.py"

    @property
    def module(self) -> str:
        parts = [self.package, *self.path.removesuffix(".py").split("/")]
        return ".".join(parts[:-1] if self.is_package else parts)

    @property
    def room(self) -> str:
        """The file's folder directly below the package, or its own name if it is a single module; "" for the root."""
        return room_of(self.module)


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


class Package:
    """Every Python file below `folder`, which is the package `inflight`, a synthetic one, or `name`."""

    def __init__(self, folder: Path, name: str = PACKAGE) -> None:
        self.files = [
            SourceFile(path.relative_to(folder).as_posix(), path.read_text(encoding="utf-8"), name)
            for path in sorted(folder.rglob("*.py"))
        ]
        self.by_module = {file.module: file for file in self.files}

    @property
    def rooms(self) -> set[str]:
        return {file.room for file in self.files} - {""}

    def imports(self, file: SourceFile) -> list[Import]:
        return list(self._imports(file, file.tree, at_run_time=True))

    def _imports(self, file: SourceFile, node: ast.AST, *, at_run_time: bool) -> Iterator[Import]:
        for module in self._imported_modules(file, node):
            assert isinstance(node, ast.stmt | ast.expr)
            yield Import(module, node.lineno, at_run_time)
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        body_of_type_checking = node.body if isinstance(node, ast.If) and _is_type_checking(node.test) else []
        for child in ast.iter_child_nodes(node):
            yield from self._imports(
                file, child, at_run_time=at_run_time and not is_function and child not in body_of_type_checking
            )

    def _imported_modules(self, file: SourceFile, node: ast.AST) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = file.module.split(".")
                parts = parts[: len(parts) - node.level + (1 if file.is_package else 0)]
                base = ".".join([*parts, base] if base else parts)
            return sorted({self._module_or_parent(base, alias.name) for alias in node.names})
        if isinstance(node, ast.Call) and node.args and _name(node.func) in {"import_module", "__import__"}:
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                return [argument.value]
        return []

    def _module_or_parent(self, base: str, name: str) -> str:
        """`from inflight import errors` imports a module, `from inflight import LLM` a name of the public API."""
        return f"{base}.{name}" if f"{base}.{name}" in self.by_module else base


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def _is_type_checking(test: ast.expr) -> bool:
    return _name(test) == "TYPE_CHECKING"


def write_package(folder: Path, files: dict[str, str]) -> Package:
    """A synthetic package below `folder`, to see that a check can fail."""
    for name, text in files.items():
        path = folder / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return Package(folder / PACKAGE)
