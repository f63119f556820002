"""`TemplateSandbox`: the jinja2 environment of chat templates, as transformers sets it up, and `render`."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from types import BuiltinMethodType, MethodType
from typing import Any, cast

import jinja2
import jinja2.ext
from jinja2 import nodes, pass_context
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from markupsafe import Markup

from inflight.tokenizer.sandbox.budget import MAX_TEXT, TemplateBudget, TemplateLimitError
from inflight.tokenizer.sandbox.charges import INNER, add_charges
from inflight.tokenizer.sandbox.context import BudgetContext
from inflight.tokenizer.sandbox.filters import Callables, bound_filters, bound_tests
from inflight.tokenizer.sandbox.methods import charge_keys, charge_method, is_small
from inflight.tokenizer.sandbox.operators import INNER_FILTERS, OPERATORS, printed
from inflight.tokenizer.sandbox.text_format import TextFormat

MAX_SOURCE = 2**20  # characters
_MAX_TIME_FORMAT = 1000
_DICT_STEPS = 50
_ITERATED = ("join", "fromkeys", "isdisjoint")  # methods that read an iterator


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Renders templates of strangers, each with a budget."""

    intercepted_binops = frozenset(OPERATORS)
    context_class = BudgetContext

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
            optimized=False,  # the optimizer runs parts of the template while it compiles it
            finalize=printed,
        )
        bound_filters(self.filters)
        bound_tests(cast(Callables, self.tests))
        self.filters |= INNER_FILTERS
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _Dict(),
            "namespace": _Namespace,
        }

    def read(self, source: str) -> nodes.Template:
        """Returns the template's tree, as it was written."""
        if len(source) > MAX_SOURCE:
            raise jinja2.TemplateSyntaxError(f"it has more than {MAX_SOURCE:,} characters", 1)
        return self.parse(source)

    def make(self, template: nodes.Template) -> jinja2.Template:
        """Compiles a template. Changes the tree."""
        return self.from_string(cast(nodes.Template, add_charges(template).set_environment(self)))

    @staticmethod
    def render(template: jinja2.Template, variables: Mapping[str, Any], budget: TemplateBudget) -> str:
        """Returns the template's text.

        Raises:
            TemplateLimitError: the text is too long, or the template does too much.
            Exception: whatever Python can raise.
        """
        context = template.new_context(dict(variables))
        assert isinstance(context, BudgetContext)
        context.budget = budget
        pieces: list[str] = []
        room = MAX_TEXT
        for piece in template.root_render_func(context):
            pieces.append(piece)
            room -= len(piece)
            if room < 0:
                raise TemplateLimitError(f"it makes more than {MAX_TEXT:,} characters")
        return "".join(pieces)

    # -- what jinja2 calls while it renders

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        assert isinstance(context, BudgetContext)
        return OPERATORS[operator](context.budget, left, right)

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        assert isinstance(context, BudgetContext)
        budget = context.budget
        if type(called) is BuiltinMethodType:
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            if not kwargs and is_small(called.__self__, called.__name__, args):
                return called(*args)
            if called.__name__ in _ITERATED:
                args = tuple([budget.list(value) if isinstance(value, Iterator) else value for value in args])
            charge_method(budget, called.__self__, called.__name__, args, kwargs)
            return budget.take(called(*args, **kwargs))
        if type(called) is MethodType:
            args = _charge_python_method(budget, called, args, kwargs)
        elif called is _Namespace:
            args = _charge_dict(budget, args)
        result = super().call(context, called, *args, **kwargs)
        if not isinstance(called, (Macro, LoopContext, BlockReference)):
            return result
        return budget.take(result)

    def call_filter(self, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        if name in INNER:
            raise jinja2.TemplateRuntimeError(f"No filter named {name!r}.")
        return super().call_filter(name, value, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if not isinstance(value, (MethodType, BuiltinMethodType)) or value.__name__ not in ("format", "format_map"):
            return None
        if not isinstance(value.__self__, str):
            return None
        return TextFormat(self, value.__self__, takes_map=value.__name__ == "format_map")

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Joins the pieces of a block. Who gets the text charges for it."""
        pieces = list(pieces)
        if sum(map(len, pieces)) > MAX_TEXT:
            raise TemplateLimitError(f"it makes a value of more than {MAX_TEXT:,} characters")
        return "".join(pieces)


def _charge_python_method(
    budget: TemplateBudget, called: MethodType, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Of `Markup`, or of the variable `loop`. Returns the arguments, with lists in place of iterators."""
    owner = called.__self__
    if not isinstance(owner, Markup) and owner is not Markup:
        budget.read(*args)
        return args
    args = tuple([budget.list(value) if isinstance(value, Iterator) else value for value in args])
    given = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}
    charge_method(budget, owner, called.__name__, args, given)
    return args


def _charge_dict(budget: TemplateBudget, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Of `dict(*args)`. Returns the arguments, with a list in place of an iterator."""
    budget.spend(_DICT_STEPS)
    if args and not isinstance(args[0], Mapping):
        pairs = [(key, value) for key, value in budget.list(args[0])]
        args = (pairs, *args[1:])
        charge_keys(budget, [key for key, _ in pairs])
    elif args:
        charge_keys(budget, args[0])
    return args


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks the assistant's text for training. In a prompt its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012  declared like this in the base class

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """Refuses names that begin with an underscore, so that templates cannot reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no `self`, so that namespace(self=...) works, as in jinja2
        attributes: dict[str, Any] = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_attribute(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"  # namespaces can hold each other, so what they hold can be of any length


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not store {name!r} on a namespace")


class _Dict:
    """Gives templates `dict(...)` and `dict.fromkeys(...)`, but not the class `dict` itself."""

    @pass_context
    def __call__(self, context: BudgetContext, /, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*_charge_dict(context.budget, args), **kwargs)

    @pass_context
    def fromkeys(self, context: BudgetContext, /, keys: Any, value: Any = None) -> dict[Any, Any]:
        keys = context.budget.list(keys)
        charge_keys(context.budget, keys)
        return dict.fromkeys(keys, value)


@pass_context
def _raise_exception(context: BudgetContext, message: Any) -> None:
    context.budget.read(message)
    raise jinja2.TemplateError(message)


@pass_context
def _strftime_now(context: BudgetContext, format: str) -> str:
    if len(format) > _MAX_TIME_FORMAT:
        raise TemplateLimitError(f"it asks for the time in a format of more than {_MAX_TIME_FORMAT:,} characters")
    context.budget.spend(len(format) >> 1)
    return datetime.now().strftime(format)
