"""How much source there is, and how dense it is. `scripts/core.py` and `scripts/path` count with it."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, fields

NODES_IN_A_LINE = 5  # what `size` takes for a line


@dataclass(frozen=True, slots=True)
class SourceSize:
    """Counts of one file, or of several."""

    files: int
    code: int  # lines without blank lines, comments and docstrings
    nodes: int  # expressions and statements of the syntax tree, whatever lines they stand in
    tuple_assignments: int  # statements such as `a, b = x, y`

    @classmethod
    def of(cls, text: str) -> SourceSize:
        tree = ast.parse(text)
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.expr | ast.stmt)]
        return cls(1, len(code_lines(text, tree)), len(nodes), sum(map(_is_tuple_assignment, nodes)))

    @classmethod
    def sum(cls, sizes: Iterable[SourceSize]) -> SourceSize:
        listed = list(sizes)
        return cls(*(sum(getattr(each, field.name) for each in listed) for field in fields(cls)))

    @property
    def size(self) -> int:
        """Lines, if each had five nodes. Code that is written in fewer lines has the same size."""
        return round(self.nodes / NODES_IN_A_LINE)

    @property
    def nodes_a_line(self) -> float:
        return self.nodes / self.code if self.code else 0.0

    @property
    def tuple_assignments_in_1000_lines(self) -> float:
        return 1000 * self.tuple_assignments / self.code if self.code else 0.0


def code_lines(text: str, tree: ast.Module | None = None) -> set[int]:
    """The numbers of the lines, from 1, that are not blank and in no comment or docstring. `tree`: the syntax tree of the text,
    if it has been parsed already."""
    docstrings = set[int]()
    for node in ast.walk(ast.parse(text) if tree is None else tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            match node.body[0]:
                case ast.Expr(value=ast.Constant(value=str()), lineno=start, end_lineno=int(end)):
                    docstrings.update(range(start, end + 1))
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    return {number for number, line in lines if line and not line.startswith("#")} - docstrings


def _is_tuple_assignment(node: ast.AST) -> bool:
    match node:
        case ast.Assign(targets=[ast.Tuple()], value=ast.Tuple()):
            return True
    return False
