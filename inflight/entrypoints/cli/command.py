"""`command`: what every command has in common: groups of options defined once, and errors as one line.

A parameter whose type is a dataclass stands for the dataclass's fields, each of them an option:

    @command
    def generate(prompt: list[str], engine: EngineOptions) -> None: ...     # --prompt, --model, --dtype, ...

Exit codes: 0 done, 1 the engine or the machine failed, 2 the user's mistake, 130 interrupted.
"""

from __future__ import annotations

import functools
import inspect
import logging
import traceback
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, get_type_hints

import typer
from typer.core import TyperCommand

from inflight.errors import EngineError, InflightError

HELP_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
GENERAL = "Options"

Command = Callable[..., None]  # its parameters are read by typer


def command(function: Command) -> Command:
    """Expand option groups for typer and turn errors into a line on stderr and an exit code."""
    hints = get_type_hints(function, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if is_dataclass(hints[name]):
            groups[name] = hints[name]
            parameters += _options_of(hints[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(function)
    def run(**values: Any) -> None:  # Any: typer has converted them
        with_groups = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        try:
            function(**values, **with_groups)
        except (InflightError, OSError) as error:
            if isinstance(error, BrokenPipeError):  # `inflight ... | head`: typer ends quietly
                raise
            raise typer.Exit(report(error)) from error

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


class GroupedHelp(TyperCommand):
    """Help as plain text (drawing boxes costs more time than all the rest), options under their group's title."""

    def format_options(self, ctx: Any, formatter: Any) -> None:  # Any: typer keeps these two types to itself
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                title = getattr(parameter, "rich_help_panel", None) or GENERAL
                groups.setdefault(title, []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


def report(error: InflightError | OSError) -> int:
    """Print the error's first line, at log level DEBUG its traceback before it; returns the exit code."""
    if logging.getLogger("inflight").isEnabledFor(logging.DEBUG):
        traceback.print_exception(error)
    first_line, _, rest = str(error).partition("\n")
    typer.echo(f"error: {first_line}{' (-v shows all of it)' if rest else ''}", err=True)
    return 1 if isinstance(error, (EngineError, OSError)) else 2


def set_log_level(level: str) -> None:
    """Log to stderr what Inflight reports at `level` and above."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("inflight").setLevel(level)


def _options_of(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=_default(field), annotation=hints[field.name]
        )
        for field in fields(group)
    ]


def _default(field: Field[Any]) -> object:
    return inspect.Parameter.empty if field.default is MISSING else field.default
