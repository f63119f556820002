"""`LayeredCommand`: options from flags, the environment and a file, and everything that is wrong with them at once.

A value is taken from the first that has one: the command line, the environment (PREFIX_ and the option's name in capitals), the
file of `--config`, the default. Wherever it stands, it is read as on the command line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import typer

from inflight import envs
from inflight.entrypoints.cli.command import GroupedHelp, wrong_value
from inflight.entrypoints.serve.config_file import read_config_file
from inflight.errors import ConfigError
from inflight.setting import check_values

_T = TypeVar("_T")

_PROBLEMS = "inflight.problems"
_ASSIGNMENT = re.compile(r"(?:^|(?<=; ))(\w+)=(?:'[^']*'|\S+)")  # how a ConfigError begins: port=70000 is not ...
NOT_IN_ENVIRONMENT = frozenset({"check"})  # these say what to do, not how
NOT_IN_FILE = NOT_IN_ENVIRONMENT | {"config"}


class LayeredCommand(GroupedHelp):
    """The command has an option `config`. Its body calls `problems_of`: what cannot be read is left at its default."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # Any: typer's own
        super().__init__(*args, **kwargs)
        for parameter in self.params:
            if parameter.param_type_name == "option":
                parameter.show_envvar = False  # type: ignore[attr-defined]  # one rule names them all
                parameter.allow_from_autoenv = parameter.name not in NOT_IN_ENVIRONMENT  # type: ignore[attr-defined]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # Any: typer keeps this type to itself
        problems = ctx.meta.setdefault(_PROBLEMS, [])
        self._read_variables(ctx)
        given, rest = self.read_line(ctx, self.own_arguments(ctx, args))
        for parameter in sorted(self.get_params(ctx), key=lambda parameter: not parameter.is_eager):
            try:
                parameter.handle_parse_result(ctx, given, rest)
            except typer.BadParameter as error:
                value, _ = parameter.consume_value(ctx, given)
                problems.append(wrong_value(_where(ctx, parameter.name), value, error))
                ctx.params[parameter.name] = parameter.process_value(ctx, parameter.default)
            if parameter.name == "config" and (path := ctx.params["config"]) is not None:
                several = {known.name: getattr(known, "multiple", False) for known in self.params}
                names = {known.name for known in self.params if known.param_type_name == "option"} - NOT_IN_FILE
                try:
                    values, wrong = read_config_file(Path(path).expanduser(), names)
                    problems += wrong
                    ctx.default_map = {
                        name: [value] if several[name] and isinstance(value, str) else value
                        for name, value in values.items()
                    }
                except ConfigError as error:
                    problems.append(str(error))
        if rest:
            ctx.fail(f"{self.name} takes one MODEL; {rest[0]!r} is a second one")
        return rest

    def _read_variables(self, ctx: Any) -> None:  # Any: as above
        """Warn of variables that name no option. Remove those of Kubernetes, as INFLIGHT_SERVE_PORT=tcp://10.0.0.1:80."""
        prefix = f"{ctx.auto_envvar_prefix}_"
        for name in envs.kubernetes_variables(os.environ, prefix):
            note = f"{name}={os.environ.pop(name)!r} was set by Kubernetes for a Service of this name; it is ignored"
            if name == f"{prefix}PORT":
                typer.echo(f"note: {note}", err=True)
        known = {f"{prefix}{each.name.upper()}" for each in self.params if getattr(each, "allow_from_autoenv", False)}
        for warning in envs.unknown_variables(os.environ, known | set(envs.API_KEY_VARIABLES), prefix):
            typer.echo(f"warning: {warning}", err=True)


def _where(context: Any, name: str) -> str:  # Any: as above
    """Where the value of an option was given: the variable, the key in the config file, or the option."""
    source = context.get_parameter_source(name)
    kind = "" if source is None else source.name
    if kind == "ENVIRONMENT":
        return f"{context.auto_envvar_prefix}_{name.upper()}"
    if kind == "DEFAULT_MAP":
        return f"{name} in {context.params['config']}"
    return f"--{name.replace('_', '-')}"


def with_sources(context: typer.Context, problem: str) -> str:
    """The problem; behind each value that is not from the command line its source: port=0 (INFLIGHT_SERVE_PORT) is"""

    def add(match: re.Match[str]) -> str:
        source = context.get_parameter_source(match[1])
        is_elsewhere = source is not None and source.name in ("ENVIRONMENT", "DEFAULT_MAP")
        return f"{match[0]} ({_where(context, match[1])})" if is_elsewhere else match[0]

    return _ASSIGNMENT.sub(add, problem)


def problems_of(context: typer.Context) -> list[str]:
    """The list of problems so far; callers append to it."""
    found: list[str] = context.meta[_PROBLEMS]
    return found


def is_given_on_command_line(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def collect(problems: list[str], make: Callable[[], _T]) -> _T | None:
    """What `make` returns; a `ConfigError` of it becomes a problem."""
    try:
        return make()
    except ConfigError as error:
        problems.append(str(error))
        return None


def without_wrong_values(kind: type[_T], values: Mapping[str, Any]) -> _T | None:
    """`kind` of its right values, so that these can be judged further; None if they contradict each other."""
    wrong = check_values(kind, values)
    return collect([], lambda: kind(**{name: value for name, value in values.items() if name not in wrong}))
