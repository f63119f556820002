"""Finds the mistakes that can be made in the package's source, and draws some of them. `scripts/mistakes.py` tries them."""

from __future__ import annotations

import ast
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tests.architecture.source import PACKAGE, Package, SourceFile

ONLY_ON_A_GPU = ("device/cuda.py",)
SMALL_INTEGERS = range(-1, 9)
SYMMETRIC = {"min", "max", "gcd", "lcm"}  # swapped arguments change nothing
COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}


class Edit(NamedTuple):
    """The bytes [start, end) of a file are replaced."""

    start: int
    end: int
    after: str


@dataclass(frozen=True)
class Mistake:
    number: int
    path: str  # relative to the root
    line: int
    start: int  # bytes [start, end) of the file
    end: int
    before: str
    after: str
    code: str  # the text of the line

    @property
    def room(self) -> str:
        return SourceFile(self.path.partition("/")[2], "").room


class Places:
    """Finds all edits of a file. Each edit makes one mistake."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def all(self) -> list[Edit]:
        return list(self._below(ast.parse(self.source)))

    def line(self, edit: Edit) -> int:
        return self.source.count(b"\n", 0, edit.start) + 1

    def _start(self, node: ast.expr | ast.stmt) -> int:
        return self._lines[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._lines[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr | ast.stmt) -> str:
        return self.source[self._start(node) : self._end(node)].decode()

    def _replace(self, node: ast.expr | ast.stmt, after: str) -> Edit:
        return Edit(self._start(node), self._end(node), after)

    def _between(self, left: ast.expr, right: ast.expr, old: str, new: str) -> Edit:
        """Replaces what stands between two expressions, parentheses aside."""
        start = self._end(left)
        start += self.source[start : self._start(right)].index(old.encode())
        return Edit(start, start + len(old), new)

    def _below(self, node: ast.AST) -> Iterator[Edit]:
        if self._is_passed_over(node):
            return
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                children: list[ast.AST | None] = [*node.args.defaults, *node.args.kw_defaults, *node.body]
                ends = node.body[-1:]
            case ast.ClassDef():
                children, ends = [*node.body], []
            case ast.AnnAssign():
                children, ends = [node.value], []
            case ast.Module():
                children, ends = [child for child in node.body if not _is_named_number(child)], []
            case _:
                children, ends = [*ast.iter_child_nodes(node)], []
        for child in children:
            if isinstance(child, ast.stmt) and not self._is_passed_over(child):
                yield from self._of_statement(child, is_end=child in ends)
            elif isinstance(child, ast.expr) and not self._is_passed_over(child):
                is_endless = isinstance(node, ast.While) and child is node.test and isinstance(child, ast.Constant)
                yield from () if is_endless else self._of_expression(child)
            if child is not None:
                yield from self._below(child)

    def _is_passed_over(self, node: ast.AST) -> bool:
        match node:
            case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
                return True
            case ast.Expr(value=ast.Constant()) | ast.FunctionDef(name="__repr__"):  # the first: a docstring
                return True
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="logger")))) | ast.keyword(arg="strict"):
                return True
            case ast.If(test=test) | ast.IfExp(test=test):
                return any(word in self._text(test) for word in ("TYPE_CHECKING", "__main__", "cuda"))
            case ast.Assign() | ast.Expr() | ast.Return():
                return "cuda" in self._text(node)
        return False

    def _of_statement(self, node: ast.stmt, *, is_end: bool) -> Iterator[Edit]:
        match node:
            case ast.If():
                yield from self._of_condition(node.test)
                if len(node.body) == 1 and isinstance(node.body[0], ast.Raise) and not node.orelse:
                    is_elif = self._text(node).startswith("elif")
                    yield from [] if is_elif else [self._replace(node, "pass")]
            case ast.Expr(value=ast.Call() | ast.Await()) | ast.Continue() | ast.Break() | ast.AugAssign():
                yield self._replace(node, "pass")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AnnAssign(target=ast.Attribute()):
                yield self._replace(node, "pass")
            case ast.Return() if not is_end:
                yield self._replace(node, "pass")
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add | ast.Sub):
            old, new = ("+=", "-=") if isinstance(node.op, ast.Add) else ("-=", "+=")
            yield self._between(node.target, node.value, old, new)

    def _of_condition(self, test: ast.expr) -> Iterator[Edit]:
        yield self._replace(test, "True")
        yield self._replace(test, "False")

    def _of_expression(self, node: ast.expr) -> Iterator[Edit]:
        match node:
            case ast.Compare():
                for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                    yield self._between(left, right, *COMPARISONS[type(op)])
            case ast.BoolOp():
                old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
                for left, right in pairwise(node.values):
                    yield self._between(left, right, old, new)
            case ast.UnaryOp(op=ast.Not()):
                yield Edit(self._start(node), self._start(node) + len("not "), "")
            case ast.BinOp(op=ast.Add() | ast.Sub()):
                old, new = ("+", "-") if isinstance(node.op, ast.Add) else ("-", "+")
                if not any(isinstance(side, ast.JoinedStr) or _is_text(side) for side in (node.left, node.right)):
                    yield self._between(node.left, node.right, old, new)
            case ast.Constant(value=bool(value)):
                yield self._replace(node, str(not value))
            case ast.Constant(value=int(value)) if value in SMALL_INTEGERS:
                yield self._replace(node, str(value + 1))
                yield self._replace(node, str(value - 1))
            case ast.Call():
                name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
                if isinstance(node.func, ast.Name) and name in ("min", "max"):
                    yield self._replace(node.func, "max" if name == "min" else "min")
                for left, right in pairwise(node.args):
                    texts = self._text(left), self._text(right)
                    is_starred = isinstance(left, ast.Starred) or isinstance(right, ast.Starred)
                    if name not in SYMMETRIC and not is_starred and texts[0] != texts[1]:
                        comma = self.source[self._end(left) : self._start(right)].decode()
                        yield Edit(self._start(left), self._end(right), texts[1] + comma + texts[0])
            case ast.Slice():
                for bound in (node.lower, node.upper):
                    if bound is not None:
                        yield self._replace(bound, "")
                        if not isinstance(bound, ast.Constant):
                            yield self._replace(bound, f"{self._text(bound)} + 1")
                            yield self._replace(bound, f"{self._text(bound)} - 1")
            case ast.IfExp():
                yield from self._of_condition(node.test)
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                for test in (test for each in node.generators for test in each.ifs):
                    yield from self._of_condition(test)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _is_named_number(node: ast.stmt) -> bool:
    """NAME = 4 * 1024, outside of functions and classes."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return False
    return all(
        isinstance(each, ast.Constant | ast.BinOp | ast.UnaryOp | ast.operator | ast.unaryop)
        for each in ast.walk(node.value)
    )


def apply(source: bytes, edit: Edit | Mistake) -> bytes:
    return source[: edit.start] + edit.after.encode() + source[edit.end :]


def compiles(source: bytes) -> bool:
    try:
        compile(source, "mistake", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def draw(root: Path, seed: int) -> Iterator[Mistake]:
    """All mistakes of a seed, in the order of their numbers. The same source and seed always give the same mistakes."""
    by_line: dict[tuple[str, int], list[Edit]] = defaultdict(list)
    sources: dict[str, bytes] = {}
    for file in Package(root / PACKAGE).files:
        path = f"{PACKAGE}/{file.path}"
        places = Places(file.text.encode())
        sources[path] = places.source
        for edit in places.all() if file.path not in ONLY_ON_A_GPU else []:
            by_line[path, places.line(edit)].append(edit)
    generator = random.Random(seed)
    number = 0
    for path, line in generator.sample(sorted(by_line), len(by_line)):
        edit, source = generator.choice(by_line[path, line]), sources[path]
        if compiles(apply(source, edit)):
            number += 1
            code = source.splitlines()[line - 1].decode().strip()
            before = source[edit.start : edit.end].decode()
            yield Mistake(number, path, line, edit.start, edit.end, before, edit.after, code)
