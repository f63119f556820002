"""Formats: `"%5d" % value`, and `"{:5}".format(value)` as `TextFormat`. A width of ten digits would fill the memory."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import pass_context
from jinja2.sandbox import SandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from markupsafe import Markup

from inflight.tokenizer.sandbox.budget import MAX_NUMBER, TemplateBudget, TemplateLimitError
from inflight.tokenizer.sandbox.context import BudgetContext
from inflight.tokenizer.sandbox.methods import charge_escape

_MAX_FORMAT = 10_000  # characters
_NUMBER = re.compile(r"\d+")
_WIDTHS = re.compile(r"%(?:\([^)]*\))?[-+ #]*(\*|\d*)(?:\.(\*|\d*))?")
_FIELD_STEPS = 200
_PERCENT_STEPS = 25


def charge_percent(budget: TemplateBudget, text: str | bytes, values: Any) -> None:
    """To be called before `text % values`."""
    pattern = text if isinstance(text, str) else text.decode("latin-1")
    if len(pattern) > _MAX_FORMAT and "%" in pattern:
        raise TemplateLimitError(f"it uses a format of more than {_MAX_FORMAT:,} characters")
    num_values, width = 0, 0
    for match in _WIDTHS.finditer(pattern):
        num_values += 1
        for number in match.groups():
            if number == "*":
                width += _largest(values)
            elif number:
                width += _checked(number)
    budget.spend(_PERCENT_STEPS * (1 + num_values))
    budget.read(values)
    characters = budget.size(values)[1]
    repeats = 1 if isinstance(values, tuple) else max(num_values, 1)
    budget.make(len(pattern) + width + characters * repeats)
    if isinstance(text, Markup):
        charge_escape(budget, values)


class TextFormat:
    """`text.format`, or `text.format_map`, for a template."""

    def __init__(self, environment: SandboxedEnvironment, text: str, *, takes_map: bool) -> None:
        self._environment = environment
        self._text = text
        self._takes_map = takes_map

    @pass_context
    def __call__(self, context: BudgetContext, /, *args: Any, **kwargs: Any) -> str:
        given: Sequence[Any] = args
        named: Mapping[str, Any] = kwargs
        if self._takes_map:
            if kwargs or len(args) != 1:
                raise TypeError(f"format_map() takes exactly one argument ({len(args) + len(kwargs)} given)")
            given = ()
            named = args[0]
        budget = context.budget
        if len(self._text) > _MAX_FORMAT and "{" in self._text:
            raise TemplateLimitError(f"it uses a format of more than {_MAX_FORMAT:,} characters")
        budget.spend(_FIELD_STEPS + len(self._text))
        if isinstance(self._text, Markup):
            escaping = _EscapeFormatter(self._environment, escape=self._text.escape)
            escaping.budget = budget
            return Markup(escaping.vformat(self._text, given, named))
        plain = _Formatter(self._environment)
        plain.budget = budget
        return plain.vformat(self._text, given, named)


class _Bounds:
    """Part of a formatter: charges each field."""

    budget: TemplateBudget

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.budget.spend(_FIELD_STEPS * (1 + field_name.count(".") + field_name.count("[")))
        return super().get_field(field_name, args, kwargs)  # type: ignore[misc]  # of string.Formatter

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self._charge(value)
        return super().convert_field(value, conversion)  # type: ignore[misc]

    def format_field(self, value: Any, format_spec: str) -> Any:
        self._charge(value)
        self.budget.make(sum(map(_checked, _NUMBER.findall(format_spec))))
        return super().format_field(value, format_spec)  # type: ignore[misc]

    def _charge(self, value: Any) -> None:
        self.budget.read(value)
        self.budget.make(self.budget.size(value)[1])


class _Formatter(_Bounds, SandboxedFormatter):
    pass


class _EscapeFormatter(_Bounds, SandboxedEscapeFormatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        charge_escape(self.budget, value)
        return super().format_field(value, format_spec)


def _largest(values: Any) -> int:
    """The largest width that a `*` can take from the values."""
    given = values if isinstance(values, tuple) else (values,)
    largest = max((abs(value) for value in given if isinstance(value, int)), default=0)
    return _checked(str(largest)) if largest < 10**10 else _checked("9" * 10)


def _checked(number: str) -> int:
    if len(number) > 8 or int(number) > MAX_NUMBER:
        raise TemplateLimitError(f"it uses a width of more than {MAX_NUMBER:,} in a format")
    return int(number)
