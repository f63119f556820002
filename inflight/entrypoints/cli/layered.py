"""`LayeredCommand`: reads options from flags, the environment and a file, and reports all problems at once.

The value of an option comes from the first of these places that has a value for it: the command line, the environment (PREFIX_
and the option's name in capitals), the file of `--config`, the default. The same code parses the values of the first three.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import typer

from inflight import envs
from inflight.entrypoints.cli.command import GroupedHelp, problems_of, tell
from inflight.entrypoints.serve.config_file import OptionValue, read_config_file
from inflight.errors import ConfigError
from inflight.setting import check_values

_T = TypeVar("_T")

# The part of a ConfigError's message that names a wrong value, such as "port=70000" in "port=70000 is not ...".
_ASSIGNMENT = re.compile(r"(?:^|(?<=; ))(\w+)=(?:'[^']*'|\S+)")
NOT_IN_ENVIRONMENT = frozenset({"check"})  # all other options change how the server runs; this one prevents its start
NOT_IN_FILE = NOT_IN_ENVIRONMENT | {"config"}


class LayeredCommand(GroupedHelp):
    """The command must have an option `config`. If a value is wrong, a message is added to the list that `problems_of` returns,
    and the option gets its default. So the command's body must check this list before it uses the options."""

    ends_at_problems = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # Any: typer's own
        super().__init__(*args, **kwargs)
        for parameter in self.params:
            if parameter.param_type_name == "option":
                parameter.show_envvar = False  # type: ignore[attr-defined]  # the help's epilog gives the rule for all variables
                parameter.allow_from_autoenv = parameter.name not in NOT_IN_ENVIRONMENT  # type: ignore[attr-defined]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # Any: this type is private to typer
        self._read_variables(ctx)
        return super().parse_args(ctx, args)

    def read_value(self, ctx: Any, parameter: Any, given: dict[str, Any], rest: list[str]) -> None:  # Any: as above
        super().read_value(ctx, parameter, given, rest)
        if parameter.name != "config" or (path := ctx.params["config"]) is None:
            return
        several = {known.name: getattr(known, "multiple", False) for known in self.params}
        names = {known.name for known in self.params if known.param_type_name == "option"} - NOT_IN_FILE
        values: dict[str, OptionValue] = {}
        try:
            values, problems = read_config_file(Path(os.path.expanduser(path)), names)
            problems_of(ctx).extend(problems)
        except ConfigError as error:
            problems_of(ctx).append(str(error))
        ctx.default_map = {
            name: [value] if several[name] and isinstance(value, str) else value for name, value in values.items()
        }

    def where(self, ctx: Any, parameter: Any) -> str:  # Any: as above
        return _where(ctx, parameter.name)

    def _read_variables(self, ctx: Any) -> None:  # Any: as above
        """Warn about variables that have this prefix and name no option. Remove variables that Kubernetes has set, such as
        INFLIGHT_SERVE_PORT=tcp://10.0.0.1:80."""
        prefix = f"{ctx.auto_envvar_prefix}_"
        for name in envs.kubernetes_variables(os.environ, prefix):
            note = f"{name}={os.environ.pop(name)!r} was set by Kubernetes for a Service of this name; it is ignored"
            if name == f"{prefix}PORT":
                tell("note", note)
        known = {f"{prefix}{each.name.upper()}" for each in self.params if getattr(each, "allow_from_autoenv", False)}
        for warning in envs.unknown_variables(os.environ, known | set(envs.API_KEY_VARIABLES), prefix):
            tell("warning", warning)


def _where(context: Any, name: str) -> str:  # Any: as above
    """The place where the value of an option was given: the name of the variable, the key and the config file, or the flag."""
    source = source_of(context, name)
    if source == "ENVIRONMENT":
        return f"{context.auto_envvar_prefix}_{name.upper()}"
    if source == "DEFAULT_MAP":
        return f"{name} in {context.params['config']}"
    return f"--{name.replace('_', '-')}"


def source_of(context: typer.Context, name: str) -> str:
    """The place of an option's value, as typer names it: COMMANDLINE, ENVIRONMENT, DEFAULT_MAP (the config file) or DEFAULT. ""
    if the command has no such option."""
    source = context.get_parameter_source(name)
    return "" if source is None else source.name


# Any: checked here
def checked(context: typer.Context, kind: Callable[..., _T], values: Mapping[str, Any]) -> _T | None:
    """Make an object of class `kind` from these values. A message about wrong values is added to the list that `problems_of`
    returns. For each value from the environment or the config file, the message names the place.

    If values are wrong, the result has defaults instead of them, so that later checks can use the result. If the right values
    contradict each other, the result is None.
    """

    def add_source(match: re.Match[str]) -> str:
        is_elsewhere = source_of(context, match[1]) in ("ENVIRONMENT", "DEFAULT_MAP")
        if is_elsewhere:
            return f"{match[0]} ({_where(context, match[1])})"
        return match[0]

    try:
        return kind(**values)
    except ConfigError as error:
        problems_of(context).append(_ASSIGNMENT.sub(add_source, str(error)))
    wrong = check_values(kind, values)  # type: ignore[arg-type]  # a class
    with contextlib.suppress(ConfigError):
        return kind(**{name: value for name, value in values.items() if name not in wrong})
    return None
