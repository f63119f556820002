"""`setting`: declares a field of a settings class with its default, help and bounds, for checks and for CLI options.

    port: int = setting(8000, "Port to listen on.", bounds=(0, 65535), metavar="PORT")

`check_values` compares a value with its type and bounds. `entrypoints/cli/options.py` makes the option --port from the same
declaration. `inflight serve` also reads the variable INFLIGHT_SERVE_PORT and the key `port` of its configuration file.
"""

import difflib
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

_KEY = "setting"  # in the metadata of a field
_Class = TypeVar("_Class")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """
    Attributes:
        help: what the value means, for `--help` and for readers of the class.
        group: title of the setting's section in `--help`. A field without a group does not become an option.
        bounds: the smallest and the largest number that are allowed.
        excludes_low: the value must be greater than the smallest number.
        choices: all values that are allowed.
        metavar: what `--help` shows in place of the value.
        flags: how the option is written. By default it is written as --name.
        short: a further way to write it, such as -n, if there are no `flags`.
        option: name of the option, if it differs from the field's name: the field `served_model_names` has the option
            --served-model-name.
        parse: makes the value from the text of a command line. Raises ValueError.
        variables: further environment variables that set the option.
        is_secret: if True, neither `repr` nor an error shows the value.
        name, type, default: name, type and default of the field. `type` is None if the field allows several types besides None.
        is_optional: whether the field allows None.
        element: the type of the elements if the value is a list; otherwise None.
    """

    help: str
    group: str = ""
    bounds: tuple[float, float] = (-math.inf, math.inf)
    excludes_low: bool = False
    choices: tuple[object, ...] = ()
    metavar: str = ""
    flags: tuple[str, ...] = ()
    short: str = ""
    option: str = ""
    parse: Callable[[str], object] | None = None
    variables: tuple[str, ...] = ()
    is_secret: bool = False
    name: str = ""
    type: Any = None  # Any: a class or a generic alias
    is_optional: bool = False
    default: Any = None  # Any: of the field's type
    element: Any = None  # Any: as `type`

    def problem(self, value: object) -> str | None:
        """Returns why the value is wrong, such as "port=-1 is not an integer in [0, 65535]"; None if it is right."""
        if value is None and self.is_optional:
            return None
        if self.choices:
            is_right = value in self.choices and type(value) in {type(choice) for choice in self.choices}
            allowed = f"one of {', '.join(repr(choice) for choice in self.choices if choice is not None)}"
        elif self.type is bool:
            is_right = isinstance(value, bool)
            allowed = "True, False or None" if self.is_optional else "True or False"
        elif self.type in (int, float):
            low, high = self.bounds
            kind = int if self.type is int else (int, float)
            is_number = isinstance(value, kind) and not isinstance(value, bool)
            is_right = is_number and low <= value <= high and not (self.excludes_low and value == low)  # type: ignore[operator]
            what = "an integer" if self.type is int else "a number"
            allowed = f"{what} in {'(' if self.excludes_low else '['}{_text(low)}, {_text(high)}]"
        elif self.type is str:
            is_right = isinstance(value, str) and (bool(value.strip()) or self.default == "")
            allowed = "a text" if self.default == "" else "a text with something in it"
        elif self.type == tuple[str, ...]:
            is_right = isinstance(value, tuple) and all(isinstance(entry, str) and entry.strip() for entry in value)
            allowed = "a tuple of texts with something in them"
        elif get_origin(self.type) is Mapping:
            is_right = isinstance(value, Mapping)
            allowed = "a dictionary"
        else:
            return None  # the settings class itself checks such a value
        if is_right:
            return None
        return f"{self.name}{'' if self.is_secret else f'={value!r}'} is not {allowed}"


def setting(default: Any, help: str, **more: Any) -> Any:  # Any: as `dataclasses.field`
    """A field of a dataclass. `more` are attributes of `Setting`."""
    declared = Setting(help=help, **more)
    return field(default=default, metadata={_KEY: declared}, repr=not declared.is_secret)


@functools.cache
def settings_of(kind: type) -> dict[str, Setting]:
    hints = get_type_hints(kind)
    found = {}
    for each in fields(kind):
        declared: Setting | None = each.metadata.get(_KEY)
        if declared is None:
            continue
        hint = hints[each.name]
        parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        kinds = [part for part in parts if part is not NoneType]
        elements = [get_args(part)[0] for part in kinds if get_origin(part) in (tuple, Sequence)]
        found[each.name] = replace(
            declared,
            name=each.name,
            type=kinds[0] if len(kinds) == 1 else None,
            is_optional=NoneType in parts,
            default=each.default,
            element=elements[0] if elements else None,
        )
    return found


def check_values(kind: type, values: Mapping[str, object]) -> dict[str, str]:
    """Checks values of the dataclass `kind`. Returns field name -> what is wrong, for the fields with a wrong value."""
    problems = {}
    for name, declared in settings_of(kind).items():
        value = values.get(name, declared.default)
        if value is not declared.default and (problem := declared.problem(value)) is not None:
            problems[name] = problem
    return problems


def unknown_name(kind: type, names: Iterable[str]) -> str:
    """Returns the first name that is no field of the dataclass `kind`, with a hint: "'prot'; did you mean 'port'?". Returns ""
    if all names are fields."""
    known = [each.name for each in fields(kind)]
    unknown = next((name for name in names if name not in known), None)
    if unknown is None:
        return ""
    near = difflib.get_close_matches(unknown, known, n=1)
    if near:
        return f"{unknown!r}; did you mean {near[0]!r}?"
    return f"{unknown!r}; known are {', '.join(known)}"


def names_unknown(
    error: Callable[[str], Exception], foreign: Mapping[str, str] | None = None
) -> Callable[[type[_Class]], type[_Class]]:
    """Decorates a keyword-only dataclass: a keyword that is no field raises `error` with the nearest field, or with advice.

    Args:
        error: makes the exception from its message.
        foreign: names that other libraries have -> what to give instead. If the value of such a name is None, the name is
            ignored, because programs for these libraries often pass None.
    """
    advice = foreign or {}

    def decorate(kind: type[_Class]) -> type[_Class]:
        known = frozenset(each.name for each in fields(kind))  # type: ignore[arg-type]  # a dataclass
        first = fields(kind)[0].name  # type: ignore[arg-type]
        construct = kind.__init__

        @functools.wraps(construct)
        def check_names(self: _Class, *values: object, **given: object) -> None:
            if values:
                raise error(
                    f"{kind.__name__} takes its values by name, as in {first}=...; given was {values[0]!r:.100}"
                )
            construct(self, **(given if given.keys() <= known else known_names(given)))

        def known_names(given: Mapping[str, object]) -> dict[str, object]:
            found = {name: value for name, value in given.items() if not (name in advice and value is None)}
            for name in found.keys() - known:
                if name in advice:
                    raise error(f"{kind.__name__} has no {name!r}: {advice[name]}")
                raise error(f"{kind.__name__} has no {unknown_name(kind, [name])}")
            return found

        kind.__init__ = check_names  # type: ignore[assignment, method-assign]
        return kind

    return decorate


def _text(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"
