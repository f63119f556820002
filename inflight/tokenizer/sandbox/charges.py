# ruff: noqa: N802  jinja2 calls visit_NAME for a node of this name

"""Adds to a template's tree what counts the work of a rendering, before the tree is compiled.

Every body that can run more than once begins with a statement that spends the steps of one run: those of its most expensive
branch. What else can be expensive goes through one of the filters in `INNER`. Their names have a blank, so no template can
write them.
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, cast

import jinja2
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from inflight.tokenizer.sandbox.budget import MAX_BITS

RUN = "run of a body"
PLUS = "a plus b"
JOINED = "a ~ b"
KEY = "key of a dict"
SLICED = "slice of a list"
SEARCHED = "searched by in"
COMPARED = "compared with a"
UNPACKED = "unpacked by *"
CAPTURED = "captured text"
INNER = (RUN, PLUS, JOINED, KEY, SLICED, SEARCHED, COMPARED, UNPACKED, CAPTURED)

# What one node of this kind takes, without what is in it. One step is about 50 ns.
_STEPS: dict[type[nodes.Node], int] = {
    nodes.Call: 80,
    nodes.Filter: 40,
    nodes.Test: 30,
    nodes.Getattr: 45,
    nodes.Getitem: 10,
    nodes.Add: 10,
    nodes.Sub: 10,
    nodes.Mul: 20,
    nodes.Pow: 20,
    nodes.Mod: 30,
    nodes.FloorDiv: 100,
    nodes.Concat: 20,
    nodes.For: 20,
    nodes.Macro: 30,
    nodes.CallBlock: 60,
    nodes.Block: 30,
    nodes.Output: 4,
}
_PER_RUN = 6
_PER_MACRO = 60
_NUMBERS = (nodes.Sub, nodes.Neg, nodes.Pos, nodes.Div, nodes.FloorDiv, nodes.Pow)  # these return numbers only
_Node = TypeVar("_Node", bound=nodes.Node)


def add_charges(template: nodes.Template) -> nodes.Template:
    """Changes the tree in place, and returns it.

    Raises:
        TemplateSyntaxError: the template has an integer that is too large.
    """
    escapes = template.find(nodes.EvalContextModifier) is not None
    charged: nodes.Template = _Charges(escapes=escapes).visit(template)
    return charged


class _Charges(NodeTransformer):
    def __init__(self, *, escapes: bool) -> None:
        self._escapes = escapes  # whether a part of the template may write <b> as &lt;b&gt;

    # -- bodies

    def visit_For(self, node: nodes.For) -> nodes.For:
        node.body.insert(0, nodes.ExprStmt(_run(node.body), lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(_run([node.test]), node.test, lineno=node.lineno)
        return self._inside(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        node.body.insert(0, nodes.ExprStmt(_run([*node.defaults, *node.body], _PER_MACRO), lineno=node.lineno))
        return self._inside(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:
        node.body.insert(0, nodes.ExprStmt(_run([*node.defaults, *node.body], _PER_MACRO), lineno=node.lineno))
        return self._inside(node)

    def visit_Block(self, node: nodes.Block) -> nodes.Block:
        node.body.insert(0, nodes.ExprStmt(_run(node.body), lineno=node.lineno))
        return self._inside(node)

    # -- captured text

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.AssignBlock:
        if node.filter is None:
            node.filter = _no_input(CAPTURED, node.lineno)
        return self._inside(node)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Filter:
        if node.node is None and node.name != CAPTURED:
            node.node = _no_input(CAPTURED, node.lineno)
        self._bound_unpacking(node)
        return self._inside(node)

    def visit_Test(self, node: nodes.Test) -> nodes.Test:
        self._bound_unpacking(node)
        return self._inside(node)

    def visit_Call(self, node: nodes.Call) -> nodes.Call:
        self._bound_unpacking(node)
        return self._inside(node)

    # -- expressions

    def visit_Add(self, node: nodes.Add) -> nodes.Filter:
        terms: list[nodes.Expr] = []
        left: nodes.Expr = node
        while isinstance(left, nodes.Add):
            terms.append(left.right)
            left = left.left
        first, *others = [self.visit(term) for term in (left, *reversed(terms))]
        return _through(PLUS, first, others)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        first, *others = [self.visit(part) for part in node.nodes]
        return _through(JOINED, first, others)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        sliced = isinstance(node.arg, nodes.Slice)
        if not sliced and not isinstance(node.arg, (nodes.Const, *_NUMBERS)):
            node.arg = _through(KEY, node.arg)
        found = self._inside(node)
        return _through(SLICED, found) if sliced else found

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:
        if not isinstance(node.key, nodes.Const):
            node.key = _through(KEY, node.key)
        return self._inside(node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        left = node.expr
        for operand in node.ops:
            right = operand.expr
            if operand.op in ("in", "notin"):
                if not _is_constant(right):
                    operand.expr = _through(SEARCHED, right)
                if not isinstance(left, nodes.Const):
                    node.expr = _through(KEY, node.expr) if left is node.expr else node.expr
            elif not isinstance(left, nodes.Const) and not isinstance(right, nodes.Const):
                operand.expr = _through(COMPARED, right)
            left = right
        return self._inside(node)

    def visit_Const(self, node: nodes.Const) -> nodes.Const:
        if isinstance(node.value, int) and node.value.bit_length() > MAX_BITS:
            raise jinja2.TemplateSyntaxError(f"an integer has more than {MAX_BITS:,} bits", node.lineno)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        found = self._inside(node)
        if not self._escapes:
            found.nodes = [_as_data(child) for child in found.nodes]
        return found

    def _bound_unpacking(self, node: nodes.Call | nodes.Filter | nodes.Test) -> None:
        if node.dyn_args is not None:
            node.dyn_args = _through(UNPACKED, node.dyn_args)
        if node.dyn_kwargs is not None:
            node.dyn_kwargs = _through(UNPACKED, node.dyn_kwargs)

    def _inside(self, node: _Node) -> _Node:
        return cast(_Node, self.generic_visit(node))


def _through(name: str, first: nodes.Expr, others: Sequence[nodes.Expr] = ()) -> nodes.Filter:
    return nodes.Filter(first, name, list(others), [], None, None, lineno=first.lineno)


def _no_input(name: str, line: int) -> nodes.Filter:
    """A filter for the text of the block that it stands at."""
    return nodes.Filter(None, name, [], [], None, None, lineno=line)


def _run(body: Iterable[nodes.Node], steps: int = _PER_RUN) -> nodes.Filter:
    return _through(RUN, nodes.Const(steps + sum(map(_steps, body))))


def _as_data(node: nodes.Expr) -> nodes.Expr:
    if isinstance(node, nodes.Const) and isinstance(node.value, str):
        return nodes.TemplateData(node.value, lineno=node.lineno)
    return node


def _is_constant(node: nodes.Expr) -> bool:
    if isinstance(node, (nodes.List, nodes.Tuple)):
        return all(isinstance(item, nodes.Const) for item in node.items)
    return isinstance(node, nodes.Const)


def _steps(node: Any) -> int:
    """Of one run of a node, without the bodies that count for themselves."""
    own = _STEPS.get(type(node), 1)
    if isinstance(node, nodes.For):
        return own + _steps(node.iter) + sum(map(_steps, node.else_))
    if isinstance(node, (nodes.Macro, nodes.Block)):
        return own
    if isinstance(node, nodes.CallBlock):
        return own + _steps(node.call)
    if isinstance(node, nodes.If):
        tests = _steps(node.test) + sum(_steps(branch.test) for branch in node.elif_)
        branches = [node.body, node.else_, *(branch.body for branch in node.elif_)]
        return own + tests + max(sum(map(_steps, branch)) for branch in branches)
    if isinstance(node, nodes.CondExpr):
        other = 0 if node.expr2 is None else _steps(node.expr2)
        return own + _steps(node.test) + max(_steps(node.expr1), other)
    return own + sum(map(_steps, node.iter_child_nodes()))
