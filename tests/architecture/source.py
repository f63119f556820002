"""The package's source as data: its files, their syntax trees and what they import. Shared by the architecture tests.

Nothing is executed: an import is seen wherever it stands, in a function and under `TYPE_CHECKING` too.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
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

    @property
    def tree(self) -> ast.Module:
        """Shared by all that read this text: nobody may change it."""
        return _parse(self.text)

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


# Most of the architecture tests read the same files.
@cache
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def _import_nodes(text: str) -> list[tuple[ast.stmt | ast.expr, bool]]:
    """The statements and calls that import something, each with whether it is executed whenever the module is."""
    imports_by_calls = "import_module" in text or "__import__" in text
    found: list[tuple[ast.stmt | ast.expr, bool]] = []
    left: list[tuple[ast.AST, bool]] = [(_parse(text), True)]
    while left:
        node, at_run_time = left.pop()
        if isinstance(node, ast.Import | ast.ImportFrom) or (isinstance(node, ast.Call) and _imported_by_call(node)):
            found.append((node, at_run_time))
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        body_of_type_checking = node.body if isinstance(node, ast.If) and _is_type_checking(node.test) else []
        children = [each for each in ast.iter_child_nodes(node) if imports_by_calls or not isinstance(each, ast.expr)]
        for child in reversed(children):
            left.append((child, at_run_time and not is_function and child not in body_of_type_checking))
    return found


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
        return [
            Import(module, node.lineno, at_run_time)
            for node, at_run_time in _import_nodes(file.text)
            for module in self._imported_modules(file, node)
        ]

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
        assert isinstance(node, ast.Call)
        return [called] if (called := _imported_by_call(node)) else []

    def _module_or_parent(self, base: str, name: str) -> str:
        """`from inflight import errors` imports a module, `from inflight import LLM` a name of the public API."""
        return f"{base}.{name}" if f"{base}.{name}" in self.by_module else base


def _imported_by_call(node: ast.Call) -> str:
    """The module that `import_module("a.b")` or `__import__("a.b")` imports; "" for another call."""
    if not node.args or _name(node.func) not in {"import_module", "__import__"}:
        return ""
    argument = node.args[0]
    return argument.value if isinstance(argument, ast.Constant) and isinstance(argument.value, str) else ""


def dotted_name(node: ast.expr) -> str:
    """ "torch.nn.Linear"; of what is not a name before the first dot nothing is shown: ".get" for `queues[0].get`."""
    if isinstance(node, ast.Attribute):
        return f"{dotted_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


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
