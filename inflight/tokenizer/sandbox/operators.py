"""Operators, comparisons, subscripts and printed values of templates, each with a bound."""

from collections.abc import Callable, Iterator
from typing import Any

from jinja2 import pass_context
from jinja2.runtime import markup_join
from markupsafe import Markup

from inflight.tokenizer.sandbox import charges
from inflight.tokenizer.sandbox.budget import TemplateBudget, TemplateLimitError
from inflight.tokenizer.sandbox.context import BudgetContext
from inflight.tokenizer.sandbox.methods import charge_escape
from inflight.tokenizer.sandbox.text_format import charge_percent

_SEQUENCES = (str, bytes, list, tuple)
_PLAIN = frozenset((bool, float, int, str, type(None)))
_MAX_UNPACKED = 2**12
_REMAINDER_STEPS = 60  # of integers of any length
_LONG = 2**20  # characters; an escaped text is a few times longer

Operator = Callable[[TemplateBudget, Any, Any], Any]


def add(budget: TemplateBudget, left: Any, right: Any) -> Any:
    if isinstance(left, _SEQUENCES) and isinstance(right, _SEQUENCES):
        length = len(left) + len(right)
        if isinstance(left, (list, tuple)):
            budget.check_items(length)
            length *= 8
        elif isinstance(left, Markup) or isinstance(right, Markup):
            charge_escape(budget, left)
            charge_escape(budget, right)
        budget.make(length)
    return _bounded_sum(budget, left, right)


def _bounded_sum(budget: TemplateBudget, left: Any, right: Any) -> Any:
    result = left + right
    budget.check_bits(result)
    return result


def subtract(budget: TemplateBudget, left: Any, right: Any) -> Any:
    if type(left) not in _PLAIN:  # the keys of a dict
        budget.read(left, right)
    result = left - right
    budget.check_bits(result)
    return result


def multiply(budget: TemplateBudget, left: Any, right: Any) -> Any:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, _SEQUENCES) and isinstance(times, int):
            length = len(value) * max(times, 0)
            if isinstance(value, (list, tuple)):
                budget.check_items(length)
                length *= 8
            budget.make(length)
    result = left * right
    budget.check_bits(result)
    return result


def power(_: TemplateBudget, left: Any, right: Any) -> Any:
    if abs(left) > 2**16 or abs(right) > 64:
        raise TemplateLimitError("it raises a number to too high a power")
    return left**right


def modulo(budget: TemplateBudget, left: Any, right: Any) -> Any:
    if not isinstance(left, (str, bytes)):
        budget.spend(_REMAINDER_STEPS)
        return left % right
    charge_percent(budget, left, right)
    return budget.take(left % right)


OPERATORS: dict[str, Operator] = {"+": add, "-": subtract, "*": multiply, "**": power, "%": modulo}


@pass_context
def _run(context: BudgetContext, steps: int) -> bool:
    budget = context.budget
    budget.left -= steps
    if budget.left < 0:
        budget.refill()
    return True


@pass_context
def _plus(context: BudgetContext, *terms: Any) -> Any:
    """The sum of all terms, which are texts in most templates."""
    for term in terms:
        if type(term) is not str:
            break
    else:
        context.budget.make(sum(map(len, terms)))
        return "".join(terms)
    total = terms[0]
    for term in terms[1:]:
        total = add(context.budget, total, term)
    return total


@pass_context
def _joined(context: BudgetContext, *parts: Any) -> str:
    """`a ~ b ~ c`"""
    budget = context.budget
    length = 0
    for part in parts:
        if type(part) is str:
            length += len(part)
        else:
            budget.read(part)
            length += budget.size(part)[1]
    budget.make(length)
    if context.eval_ctx.autoescape:
        for part in parts:
            charge_escape(budget, part)
        return markup_join(parts)
    return "".join(map(str, parts))


@pass_context
def _key(context: BudgetContext, value: Any) -> Any:
    if type(value) not in _PLAIN:
        context.budget.read(value)
    return value


@pass_context
def _compared(context: BudgetContext, value: Any) -> Any:
    if type(value) not in _PLAIN or type(value) is str:
        context.budget.read(value)
    return value


@pass_context
def _searched(context: BudgetContext, value: Any) -> Any:
    kind = type(value)
    if kind is dict:
        return value
    budget = context.budget
    if kind is str:
        budget.left -= 1 + (len(value) >> 4)
        if budget.left < 0:
            budget.refill()
        return value
    if isinstance(value, Iterator):
        value = budget.list(value)
    budget.read(value)
    return value


@pass_context
def _sliced(context: BudgetContext, value: Any) -> Any:
    return context.budget.take(value)


@pass_context
def _unpacked(context: BudgetContext, value: Any) -> Any:
    if isinstance(value, Iterator):
        value = context.budget.list(value)
    if hasattr(value, "__len__") and len(value) > _MAX_UNPACKED:
        raise TemplateLimitError(f"it gives a function more than {_MAX_UNPACKED:,} arguments")
    return value


INNER_FILTERS: dict[str, Callable[..., Any]] = {
    charges.RUN: _run,
    charges.PLUS: _plus,
    charges.JOINED: _joined,
    charges.KEY: _key,
    charges.SLICED: _sliced,
    charges.SEARCHED: _searched,
    charges.COMPARED: _compared,
    charges.UNPACKED: _unpacked,
    charges.CAPTURED: _sliced,
}


@pass_context
def printed(context: BudgetContext, value: Any) -> Any:
    """What jinja2 calls with each value before it becomes text."""
    if type(value) is str and len(value) < _LONG:
        return value
    if type(value) not in _PLAIN:
        budget = context.budget
        budget.read(value)
        budget.make(budget.size(value)[1])
    if context.eval_ctx.autoescape:
        charge_escape(context.budget, value)
    return value
