"""`LayeredCommand`: options from flags, the environment and a file, and everything that is wrong with them at once.

A value is taken from the first that has one: the command line, the environment (PREFIX_ and the option's name in capitals), the
file of `--config`, the default. Wherever it stands, it is read as on the command line.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import typer

from inflight.entrypoints.cli.command import GroupedHelp
from inflight.entrypoints.serve.config_file import read_config_file
from inflight.errors import ConfigError

_T = TypeVar("_T")

_PROBLEMS = "inflight.problems"
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
        given, rest, _ = self.make_parser(ctx).parse_args(args=args)
        problems = ctx.meta.setdefault(_PROBLEMS, [])
        for parameter in sorted(self.get_params(ctx), key=lambda parameter: not parameter.is_eager):
            try:
                parameter.handle_parse_result(ctx, given, rest)
            except typer.BadParameter as error:
                problems.append(f"{parameter.name}: {error.message}")
                ctx.params[parameter.name] = parameter.process_value(ctx, parameter.default)
            if parameter.name == "config" and (path := ctx.params["config"]) is not None:
                several = {known.name: getattr(known, "multiple", False) for known in self.params}
                names = {known.name for known in self.params if known.param_type_name == "option"} - NOT_IN_FILE
                try:
                    values = read_config_file(Path(path).expanduser(), names)
                    ctx.default_map = {
                        name: [value] if several[name] and isinstance(value, str) else value
                        for name, value in values.items()
                    }
                except ConfigError as error:
                    problems.append(str(error))
        if rest:
            ctx.fail(f"unexpected argument {rest[0]!r}")
        return rest


def problems_of(context: typer.Context) -> list[str]:
    """What could not be read; to be added to."""
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


def without_wrong_values(kind: Callable[..., _T], values: Mapping[str, Any]) -> _T | None:
    """`kind` of those values that it takes one by one, so that the others can be judged, too; None if these do not go together.

    Every field of `kind` has a default.
    """
    good = {name: value for name, value in values.items() if collect([], functools.partial(kind, **{name: value}))}
    return collect([], lambda: kind(**good))
