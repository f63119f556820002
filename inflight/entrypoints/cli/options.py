"""Makes an option of the command line from each setting of a class, and collects the values that the user gives."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_origin, get_type_hints

import typer

from inflight.setting import Setting, settings_of
from inflight.setting_text import parse_json_object

NO_BOUND = "none"


@dataclass(frozen=True)
class Options:
    """Marks a parameter of a command that is replaced by options. The value of the parameter is a dictionary that maps the name
    of each field to the value of its option. The values have their types; nothing in this file checks their bounds.

    Attributes:
        kind: a class of settings (see `inflight.setting`). Each setting that has a group is an option. If the class has no
            settings, each of its fields is an option: its type is annotated with what `typer.Option` returns.
        only: the names of the settings that become options. If empty, all settings with a group become options.
        required: the names of the fields whose options the user must give.
        only_given: if set, the dictionary contains only the options that the user has given.
    """

    kind: type
    only: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    only_given: bool = False

    def settings(self) -> list[Setting]:
        found = settings_of(self.kind).values()
        return [each for each in found if each.group and (not self.only or each.name in self.only)]

    def names(self) -> dict[str, str]:
        """Returns a dictionary from the name of a field to the name of its option."""
        return {name: parameter.name for name, parameter in self.parameters().items()}

    def parameters(self) -> dict[str, inspect.Parameter]:
        """Returns a dictionary from the name of a field to the parameter from which typer makes the option."""
        if settings := self.settings():
            return {each.name: self._parameter(each) for each in settings}
        hints = get_type_hints(self.kind, include_extras=True)
        return {
            each.name: inspect.Parameter(
                each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=hints[each.name]
            )
            for each in fields(self.kind)
        }

    def values(self, given: Mapping[str, Any]) -> dict[str, Any]:  # Any: the settings' values
        """Returns the values of `given` by the names of the fields. In `given` the keys are the names of the options."""
        found = {name: given[option] for name, option in self.names().items() if option in given}
        lists = {each.name for each in self.settings() if each.element is not None}
        return {
            name: tuple(value) if name in lists else value
            for name, value in found.items()
            if not (name in lists and not value) and not (self.only_given and value is None)
        }

    def _parameter(self, setting: Setting) -> inspect.Parameter:
        hint: Any = setting.type or str  # Any: a type
        default = None if setting.element is not None or self.only_given else setting.default
        takes_none = setting.is_optional and default is not None
        dashed = (setting.option or setting.name).replace("_", "-")
        parse = setting.parse
        flags = (f"--{dashed}", setting.short) if setting.short else setting.flags
        if setting.element is not None:
            hint = list[setting.element]  # type: ignore[name-defined]  # a type that is known at run time only
        elif setting.type is bool and not flags:
            flags = (f"--{dashed}/--no-{dashed}",)
        elif get_origin(setting.type) is Mapping:
            hint, parse = dict[str, Any], parse or parse_json_object
        elif takes_none:
            parse = _or_none(setting)
        option = typer.Option(
            *flags,
            help=setting.help,
            rich_help_panel=setting.group,
            metavar=None
            if setting.type is bool
            else _metavar(setting) + (f"|{NO_BOUND}" if takes_none and not setting.metavar else ""),
            parser=None if parse is None else _parser(parse),
            envvar=list(setting.variables) or None,
            show_default=setting.type is not bool,
        )
        if default is None:
            hint = hint | None
        if setting.name in self.required:
            default = inspect.Parameter.empty
        return inspect.Parameter(
            setting.option or setting.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[hint, option],
        )


def _or_none(setting: Setting) -> Callable[[str], object]:
    """Returns a parser that accepts a number, or "none" for None."""

    def parse(text: str) -> object:
        if text.strip().lower() == NO_BOUND:
            return None
        try:
            return setting.type(text)
        except ValueError:
            raise ValueError(f"{text!r} is neither a number nor {NO_BOUND!r}") from None

    return parse


def _parser(parse: Callable[[str], object]) -> Callable[[str], object]:
    """Wraps `parse` for typer. Typer shows the message of a `typer.BadParameter`, but not that of a ValueError."""

    def convert(value: object) -> object:
        if not isinstance(value, str):  # the option's default, which needs no parsing
            return value
        try:
            return parse(value)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return convert


def _metavar(setting: Setting) -> str:
    if setting.metavar:
        return setting.metavar
    if setting.choices:
        return "|".join(str(choice) for choice in setting.choices if choice is not None)
    if get_origin(setting.type) is Mapping:
        return "JSON"
    return {int: "N", float: "X"}.get(setting.element or setting.type, "TEXT")
