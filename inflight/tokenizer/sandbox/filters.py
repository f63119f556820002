"""The filters and tests of templates, each with a bound: `bound_filters` and `bound_tests`.

Those in `_LOOK_AT_NOTHING` take a bounded time whatever they are given. All others read their arguments with all that is in
them, unless `_FILTERS` says how to charge for them. All take the context, so jinja2 runs none of them while it compiles.
"""

import json
import math
from collections.abc import Callable, Iterator, Sized
from typing import Any

from jinja2 import pass_context
from jinja2.filters import FILTERS, make_attrgetter

from inflight.tokenizer.sandbox import operators
from inflight.tokenizer.sandbox.budget import Counted, TemplateBudget, TemplateLimitError
from inflight.tokenizer.sandbox.context import BudgetContext
from inflight.tokenizer.sandbox.methods import (
    Charge,
    charge_case,
    charge_escape,
    charge_replace,
    charge_slow,
    charge_strip,
    charge_width,
)
from inflight.tokenizer.sandbox.text_format import charge_percent

Callables = dict[str, Callable[..., Any]]

_LOOK_AT_NOTHING = frozenset(("count", "d", "default", "first", "items", "last", "length"))
_TESTS_THAT_READ = frozenset(
    (
        "!=",
        "<",
        "<=",
        "==",
        ">",
        ">=",
        "eq",
        "equalto",
        "filter",
        "ge",
        "greaterthan",
        "gt",
        "in",
        "le",
        "lessthan",
        "lower",
    )
) | {"lt", "ne", "test", "upper"}
_TESTS_OF_NUMBERS = frozenset(("divisibleby", "even", "odd"))

_MAX_PATH = 256  # characters of the name of an attribute
_MAX_DIGITS = 4300  # as Python bounds decimal numbers
_MAX_NUMBER_TEXT = 2**20  # characters
_MAX_URL_TEXT = 2**12  # characters: regular expressions take time that grows with the square
_MAX_WORDS_TEXT = 2**20  # characters
_MAX_PRECISION = 400
_ATTRIBUTE_STEPS = 120
_BOUNDED_STEPS = 20  # of the function around a filter or test
_SUM_STEPS = 5  # of one value
_CALL_STEPS = 200  # of a filter or test that is called by its name
_GROUP_STEPS = 400
_TEXTS = frozenset((str, int))


def bound_filters(filters: Callables) -> None:
    """Puts a bound around each filter."""
    for name, function in list(filters.items()):
        if name in _OWN:
            filters[name] = _OWN[name]
        elif name not in _LOOK_AT_NOTHING:
            filters[name] = _bounded(function, _FILTERS.get(name, _read))


def bound_tests(tests: Callables) -> None:
    """Puts a bound around each test that needs one."""
    for name, function in list(tests.items()):
        if name in _TESTS_THAT_READ:
            tests[name] = _bounded(function, _read)
        elif name in _TESTS_OF_NUMBERS:
            tests[name] = _bounded(function, _numbers)


def _bounded(function: Callable[..., Any], charge: Charge) -> Callable[..., Any]:
    """The filter or test with `charge` before it. Iterators become lists first, but for those that are read one by one."""
    wants = getattr(function, "jinja_pass_arg", None)  # what jinja2 passes first: the context, or a part of it
    lazy = charge in _LAZY

    @pass_context
    def bounded(context: BudgetContext, /, *args: Any, **kwargs: Any) -> Any:
        budget = context.budget
        budget.spend(_BOUNDED_STEPS)
        if not lazy:
            if not _TEXTS.issuperset(map(type, args)):
                args = tuple([budget.list(value) if isinstance(value, Iterator) else value for value in args])
        elif args and isinstance(args[0], Iterator) and not isinstance(args[0], Counted):
            args = (Counted(budget, args[0]), *args[1:])
        charge(budget, *args, **kwargs)
        source = args[0] if args else None
        if wants is None:
            result = function(*args, **kwargs)
        elif wants.name == "context":
            result = function(context, *args, **kwargs)
        elif wants.name == "eval_context":
            result = function(context.eval_ctx, *args, **kwargs)
        else:
            result = function(context.environment, *args, **kwargs)
        if type(result) is str:
            budget.make(len(result))
            return result
        if isinstance(result, Iterator):
            return Counted(budget, result, source)
        return budget.take(result)

    return bounded


# -- what the filters cost -----------------------------------------------------------------------------------------------


def _read(budget: TemplateBudget, /, *args: Any, **kwargs: Any) -> None:
    budget.read(*args, *kwargs.values())
    budget.make(_characters(budget, args[0]) if args else 0)


def _lazily(budget: TemplateBudget, values: Any = None, /, *args: Any, **kwargs: Any) -> None:
    """Of filters that return an iterator, and look at one value after the other."""
    _attributes(budget, *args, **kwargs)
    budget.read(*args, *kwargs.values())
    if isinstance(values, Sized):
        budget.spend((_ATTRIBUTE_STEPS + _CALL_STEPS) * len(values))


def _keyed(budget: TemplateBudget, values: Any, /, *args: Any, **kwargs: Any) -> None:
    """Of filters that compare the values, or their attributes."""
    _attributes(budget, *args, **kwargs)
    items, characters, _ = budget.size(values)
    if isinstance(values, Sized):
        items = max(items, len(values))
        _list(budget, values)
    compares = 2 + math.ceil(math.log2(items + 1))
    budget.spend(items * (compares + _ATTRIBUTE_STEPS) + (characters * compares >> 5))
    budget.read(*args, *kwargs.values())


def _groupby(budget: TemplateBudget, values: Any, /, *args: Any, **kwargs: Any) -> None:
    _keyed(budget, values, *args, **kwargs)
    budget.spend(_GROUP_STEPS * len(values))


def _unique(budget: TemplateBudget, values: Any, /, *args: Any, **kwargs: Any) -> None:
    _keyed(budget, values, *args, **kwargs)
    budget.spend(len(values) * len(values) >> 2)


def _attributes(budget: TemplateBudget, /, *args: Any, **kwargs: Any) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, str) and len(value) > _MAX_PATH:
            raise TemplateLimitError(f"it gives a filter a name of more than {_MAX_PATH} characters")


def _numbers(_: TemplateBudget, *values: Any) -> None:
    """Python's `%` formats a text."""
    if any(isinstance(value, (str, bytes)) for value in values):
        raise TypeError("not a number")


def _list(budget: TemplateBudget, values: Any) -> None:
    if isinstance(values, Sized):
        budget.check_items(len(values))
        budget.spend(len(values) >> 3 if isinstance(values, str) else 0)
        budget.make((40 if isinstance(values, range) else 8) * len(values))


def _batch(budget: TemplateBudget, values: Any, linecount: Any, fill_with: Any = None) -> None:
    _lazily(budget, values)
    budget.check_items(0 if fill_with is None else linecount)


def _slice(budget: TemplateBudget, values: Any, slices: Any, fill_with: Any = None) -> None:
    _list(budget, values)
    budget.check_items(slices)


def _indent(budget: TemplateBudget, text: Any, width: Any = 4, first: Any = False, blank: Any = False) -> None:
    budget.read(text)
    per_line = len(width) if isinstance(width, str) else max(width, 0)
    num_lines = 2 + sum(text.count(end) for end in "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")
    budget.check_items(num_lines)
    budget.spend(len(text) >> 5)
    budget.make(len(text) + num_lines * (1 + per_line))


def _wordwrap(
    budget: TemplateBudget,
    text: Any,
    width: Any = 79,
    break_long_words: Any = True,
    wrapstring: Any = None,
    break_on_hyphens: Any = True,
) -> None:
    charge_slow(budget, text)
    num_wrapped = len(text) // max(width, 1)
    num_lines = num_wrapped + len(text.splitlines()) + len(text.split()) + 1
    budget.make(len(text) + num_lines * len(wrapstring or "\n"))


def _urlize(budget: TemplateBudget, text: Any, /, *args: Any, **kwargs: Any) -> None:
    length = _characters(budget, text)
    if length > _MAX_URL_TEXT:
        raise TemplateLimitError(f"it searches more than {_MAX_URL_TEXT:,} characters for addresses")
    others = sum(_characters(budget, value) for value in (*args, *kwargs.values()))
    schemes = len(kwargs.get("extra_schemes") or (args[4] if len(args) > 4 else None) or ())
    budget.spend(300 + (length * length >> 3))
    budget.make((1 + length) * (8 + others) + length * schemes)


def _urlencode(budget: TemplateBudget, value: Any) -> None:
    charge_slow(budget, value)
    budget.make(12 * _characters(budget, value))


def _pprint(budget: TemplateBudget, value: Any) -> None:
    items, characters, depth = budget.size(value)
    if items > 2**12 or characters > 2**16:
        raise TemplateLimitError("it prints a large value with pprint")
    budget.spend((items * 100 + characters * 4) * (depth + 1))
    budget.make((characters + items * 80) * (depth + 1))


def _linear(budget: TemplateBudget, text: str) -> None:
    """Of what makes a list of the words."""
    if len(text) > _MAX_WORDS_TEXT:
        raise TemplateLimitError(f"it looks for the words of more than {_MAX_WORDS_TEXT:,} characters")
    budget.spend(4 * len(text))


def _int(budget: TemplateBudget, value: Any, default: Any = 0, base: Any = 10) -> None:
    _number(budget, value)
    if base != 10 and isinstance(value, (str, bytes)) and len(value) > _MAX_DIGITS:
        raise TemplateLimitError(f"it reads an integer of more than {_MAX_DIGITS:,} digits")


def _number(budget: TemplateBudget, value: Any, *_: Any, **__: Any) -> None:
    budget.read(value)
    if isinstance(value, (str, bytes)):
        if len(value) > _MAX_NUMBER_TEXT:
            raise TemplateLimitError(f"it reads a number of more than {_MAX_NUMBER_TEXT:,} characters")
        budget.spend(len(value) >> 5)


def _round(budget: TemplateBudget, value: Any, precision: Any = 0, method: Any = "common") -> None:
    if isinstance(precision, int) and abs(precision) > _MAX_PRECISION:
        raise TemplateLimitError(f"it rounds to more than {_MAX_PRECISION} digits")


def _format(budget: TemplateBudget, text: Any, /, *args: Any, **kwargs: Any) -> None:
    charge_percent(budget, text if isinstance(text, str) else str(text), kwargs or args)


def _truncate(
    budget: TemplateBudget, text: Any, length: Any = 255, killwords: Any = False, end: Any = "...", leeway: Any = None
) -> None:
    budget.read(text)
    budget.make(len(text) + len(end))


def _replace(budget: TemplateBudget, text: Any, old: Any, new: Any, count: Any = None) -> None:
    budget.read(text, old, new)
    text, old, new = (value if isinstance(value, str) else str(value) for value in (text, old, new))
    charge_replace(budget, text, old, new, count)


def _escaped(budget: TemplateBudget, value: Any, *_: Any, **__: Any) -> None:
    charge_escape(budget, value)


def _of_text(charge: Charge) -> Charge:
    """Of a filter that makes a text of its value first."""

    def charged(budget: TemplateBudget, value: Any, /, *args: Any, **kwargs: Any) -> None:
        budget.read(value, *args, *kwargs.values())
        charge(budget, value if isinstance(value, str) else str(value), *args, **kwargs)

    return charged


def _characters(budget: TemplateBudget, value: Any) -> int:
    return len(value) if isinstance(value, str) else budget.size(value)[1]


_LAZY = frozenset((_lazily, _batch))
_FILTERS: dict[str, Charge] = {
    "batch": _batch,
    "capitalize": _of_text(charge_case),
    "center": _of_text(charge_width),
    "dictsort": _keyed,
    "e": _escaped,
    "escape": _escaped,
    "filesizeformat": _number,
    "float": _number,
    "forceescape": _escaped,
    "format": _format,
    "groupby": _groupby,
    "indent": _indent,
    "int": _int,
    "list": _list,
    "lower": _of_text(charge_case),
    "map": _lazily,
    "max": _keyed,
    "min": _keyed,
    "pprint": _pprint,
    "reject": _lazily,
    "rejectattr": _lazily,
    "replace": _replace,
    "round": _round,
    "select": _lazily,
    "selectattr": _lazily,
    "slice": _slice,
    "sort": _keyed,
    "striptags": charge_slow,
    "title": _of_text(_linear),
    "truncate": _truncate,
    "unique": _unique,
    "upper": _of_text(charge_case),
    "urlencode": _urlencode,
    "urlize": _urlize,
    "wordcount": _of_text(_linear),
    "wordwrap": _wordwrap,
    "xmlattr": _urlencode,
}


# -- filters of our own --------------------------------------------------------------------------------------------------


@pass_context
def _tojson(
    context: BudgetContext,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`. jinja2's own filter of this name escapes HTML. What `map` and `select` return becomes a list."""
    budget = context.budget
    if type(value) is not dict and isinstance(value, Iterator):
        value = budget.list(value)
    items, characters, depth = budget.size(value)
    between = sum(map(len, separators)) if separators else 0
    if indent is not None:  # a number, or text
        between += (depth + 1) * (len(indent) if isinstance(indent, str) else max(indent, 0)) + 1
        budget.spend(20 * items)  # the encoder for this is written in Python
    budget.spend(_BOUNDED_STEPS)
    expected = characters * (2 if ensure_ascii else 1) + items * between
    budget.make(expected)
    budget.spend(items + (characters >> 4))
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    budget.make(max(len(text) - expected, 0))
    return text


@pass_context
def _trim(context: BudgetContext, value: Any, chars: Any = None) -> Any:
    budget = context.budget
    if type(value) is str and chars is None:
        budget.make(len(value))
        return value.strip()
    budget.read(value, chars)
    if not isinstance(value, str):
        value = str(value)
    charge_strip(budget, value, chars)
    return budget.take(value.strip(chars))


@pass_context
def _join(context: BudgetContext, values: Any, d: Any = "", attribute: Any = None) -> Any:
    """The filter `join`. `d` stands between the values."""
    budget = context.budget
    found = budget.list(values)
    if attribute is not None:
        _attributes(budget, attribute)
        budget.spend(_ATTRIBUTE_STEPS * len(found))
        found = [make_attrgetter(context.environment, attribute)(value) for value in found]
    budget.read(found)
    budget.spend(2 * _BOUNDED_STEPS + 2 * len(found))
    budget.make(budget.size(found)[1] + len(found) * _characters(budget, d))
    return FILTERS["join"](context.eval_ctx, found, d)


@pass_context
def _sum(context: BudgetContext, values: Any, attribute: Any = None, start: Any = 0) -> Any:
    budget = context.budget
    found = budget.list(values)
    if attribute is not None:
        _attributes(budget, attribute)
        budget.spend(_ATTRIBUTE_STEPS * len(found))
        found = [make_attrgetter(context.environment, attribute)(value) for value in found]
    total = start
    budget.spend(_SUM_STEPS * len(found))
    for value in found:
        total = operators.add(budget, total, value)
    return total


@pass_context
def _attr(context: BudgetContext, value: Any, name: str) -> Any:
    context.budget.spend(200)
    context.budget.read(name)
    return FILTERS["attr"](context.environment, value, name)


@pass_context
def _reverse(context: BudgetContext, value: Any) -> Any:
    if isinstance(value, Iterator):
        value = context.budget.list(value)
    if isinstance(value, str):
        context.budget.make(len(value))
    return FILTERS["reverse"](value)


_OWN: Callables = {"attr": _attr, "join": _join, "reverse": _reverse, "sum": _sum, "tojson": _tojson, "trim": _trim}
