"""`command` and `GroupedHelp` give every command its options, its help and its one-line errors.

A parameter whose type is a class of settings is replaced by an option for each of its settings:

    @command
    def generate(prompt: list[str], engine: EngineArgs) -> None: ...     # --prompt, --model, --dtype, ...

If two such classes have a setting of the same name, only one option is made, from the first class. Both classes get its value.

Exit codes: 0 done, 1 the engine or the machine failed, 2 the user's mistake, 130 interrupted.
"""

from __future__ import annotations

import difflib
import enum
import functools
import gc
import inspect
import logging
import re
import traceback
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from inflight import logs
from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.cli.foreign_flags import sort_out
from inflight.entrypoints.cli.options import Options
from inflight.errors import ConfigError, EngineError, InflightError

if TYPE_CHECKING:
    from inflight.entrypoints.llm_engine import LLMEngine  # loads torch

_ALLOWED = {"a valid integer": "an integer", "a valid number": "a number", "a valid boolean": "true or false"}
HELP_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
GENERAL = "Options"

# a command that other programs have -> what to use instead
_INSTEAD = {
    "download": "`inflight pull ORG/NAME` downloads a model of the hub",
    "ls": "use `inflight list`",
    "remove": "use `inflight rm MODEL`",
    "run": "use `inflight chat` or `inflight generate`",
    "complete": "use `inflight generate`",
    "run-batch": "use `inflight generate -i FILE`",
    "collect-env": "use `inflight env`",
}

Command = Callable[..., None]  # its parameters are read by typer
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Log what happens, and show tracebacks. Also: INFLIGHT_LOG_LEVEL=DEBUG.")
]


class LogFormatName(enum.StrEnum):
    text = "text"
    json = "json"


LogFormat = Annotated[
    LogFormatName | None,
    typer.Option(
        "--log-format", help="How the log on stderr is written. Also: INFLIGHT_LOG_FORMAT.", show_default=False
    ),
]


class Commands(TyperGroup):
    """A group of commands. For an unknown command, the error says what to use instead."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # Any: typer's copy of click has no types
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            near = difflib.get_close_matches(name, self.list_commands(ctx), 1)
            hint = _INSTEAD.get(name) or (
                f"did you mean {near[0]!r}?" if near else f"`{ctx.command_path} --help` lists them"
            )
            ctx.fail(f"there is no command {name!r}: {hint}")
        return super().resolve_command(ctx, args)


def command(function: Command) -> Command:
    """Turn the function's parameters into options for typer. If the function raises an error, print it as one line and exit."""
    hints = get_type_hints(function, include_extras=True)
    parameters: dict[str, inspect.Parameter] = {}
    groups: dict[str, Options] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if (group := _group(hints[name])) is not None:
            groups[name] = group
            for option in group.parameters().values():
                parameters.setdefault(option.name, option)
        else:
            parameters[name] = parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)

    @functools.wraps(function)
    def run(**values: Any) -> None:  # Any: typer has converted them
        try:
            for name, group in groups.items():
                options = {option for option in group.names().values() if option in values}
                own = group.values({option: values.pop(option) for option in options})
                values[name] = group.kind(**own) if is_dataclass(hints[name]) else own
            function(**values)
        except (InflightError, OSError) as error:
            if isinstance(error, BrokenPipeError):  # as in `inflight ... | head`; typer then ends without a message
                raise
            raise typer.Exit(report(error)) from error

    run.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]  # what typer reads
    run.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    return run


def _group(hint: Any) -> Options | None:  # Any: a type
    """The options that replace a parameter of this type, or None if the parameter itself is one option."""
    if is_dataclass(hint):
        return Options(hint)  # type: ignore[arg-type]  # never an instance
    return next((extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Options)), None)


class GroupedHelp(TyperCommand):
    """A command whose help is plain text, with the options listed under the titles of their groups. Typer's own help is not
    used, because making it takes longer than the rest of the command. An error says what the user gave, and what to do.

    Attributes:
        argument_hint: what the user can give instead of an argument that is not allowed. The error about the argument ends
            with this text.
        ends_at_problems: whether a wrong value ends the command before its body runs.
    """

    argument_hint = "this command takes options only"
    ends_at_problems = True

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # Any: this type is private to typer
        given, rest = self.read_line(ctx, self.own_arguments(ctx, args))
        for parameter in sorted(self.get_params(ctx), key=lambda parameter: not parameter.is_eager):
            self.read_value(ctx, parameter, given, rest)
        if rest and any(each.param_type_name == "argument" for each in self.params):
            ctx.fail(f"{self.name} takes only one MODEL, but {rest[0]!r} is a second one: leave out one of them")
        if rest:
            ctx.fail(f"{rest[0]!r} is not an option: {self.argument_hint}")
        if self.ends_at_problems and problems_of(ctx):
            ctx.fail(problems_of(ctx)[0])
        return rest

    def read_value(self, ctx: Any, parameter: Any, given: dict[str, Any], rest: list[str]) -> None:  # Any: as above
        """Put the parameter's value into the context. If the value is wrong, add a problem, and use the default instead."""
        try:
            parameter.handle_parse_result(ctx, given, rest)
        except typer.BadParameter as error:
            value, _ = parameter.consume_value(ctx, given)
            if value is None:  # a required option is missing
                raise
            problems_of(ctx).append(wrong_value(self.where(ctx, parameter), value, error))
            ctx.params[parameter.name] = parameter.process_value(ctx, parameter.default)

    def where(self, ctx: Any, parameter: Any) -> str:  # Any: as above
        """The name of the place where the value was given, for error messages."""
        return str(max(parameter.opts, key=len))

    def own_arguments(self, ctx: Any, args: list[str]) -> list[str]:  # Any: as above
        """Returns `args` without flags of other engines. Prints a note for each flag that is left out."""
        own = {
            name: "" if getattr(option, "is_flag", True) else "+" if getattr(option, "multiple", False) else "="
            for option in self.params
            for name in (*option.opts, *option.secondary_opts)
        }
        try:
            arguments, notes = sort_out(args, own)
        except ConfigError as error:
            ctx.fail(str(error))
        for note in notes:
            tell("note", note)
        return arguments

    def read_line(self, ctx: Any, arguments: list[str]) -> tuple[dict[str, Any], list[str]]:  # Any: as above
        """Returns a dictionary from the name of an option to its value as text, and the arguments that are not options."""
        try:
            given, rest, _ = self.make_parser(ctx).parse_args(args=list(arguments))
        except Exception as error:
            name = getattr(error, "option_name", None)
            # Typer's error for an unknown option has both attributes. Its class cannot be named here, because each version of
            # typer names it differently.
            if name is None or not hasattr(error, "possibilities"):
                raise
            known = [name for option in self.params for name in (*option.opts, *option.secondary_opts)]
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
            ctx.fail(
                f"there is no option {name}" + (f"; did you mean {near[0]}?" if near else "; -h lists all options")
            )
        return given, rest

    def format_options(self, ctx: Any, formatter: Any) -> None:  # Any: these two types are private to typer
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                title = getattr(parameter, "rich_help_panel", None) or GENERAL
                groups.setdefault(title, []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


class GenerateCommand(GroupedHelp):
    argument_hint = "give a prompt as -p TEXT, and a model as -m MODEL"


class ModelCommand(GroupedHelp):
    argument_hint = "give a model as -m MODEL"


def problems_of(context: Any) -> list[str]:  # Any: typer has two types for it
    """The problems with options that were found so far. Callers add to this list."""
    found: list[str] = context.meta.setdefault("inflight.problems", [])
    return found


def wrong_value(where: str, value: object, error: typer.BadParameter) -> str:
    """One line about a wrong value: where the value was given, what it is, and what is allowed. `error` comes from typer."""
    message = error.message
    if repr(value) in message:
        return f"{where}: {message}"
    match = re.match(r"Input should be (.*?)(, unable .*)?$", message)
    allowed = "" if match is None else _ALLOWED.get(match[1], match[1])
    if allowed:
        return f"{where}: {value!r} should be {allowed}"
    return f"{where}: {value!r}: {message}"


def tell(kind: str, text: str) -> None:
    """Write a line of the command itself to stderr: "warning: ...", or an entry of the log if the log is JSON.

    Args:
        kind: "note", "warning" or "error".
    """
    if logs.is_json():
        level = {"note": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}[kind]
        record = logging.LogRecord("inflight", level, __file__, 0, text, None, None)
        logging.getLogger().handle(record)  # also a note of a command whose log level is WARNING
    else:
        logs.write_line(f"{kind}: {text}")


def report(error: InflightError | OSError) -> int:
    """Print the first line of the error, and return the exit code for it. At log level DEBUG the traceback comes first."""
    if logging.getLogger("inflight").isEnabledFor(logging.DEBUG):
        logs.write_line("".join(traceback.format_exception(error)).rstrip())
    first_line, _, rest = str(error).partition("\n")
    tell("error", f"{first_line}{' (-v shows all of it)' if rest else ''}")
    return 1 if isinstance(error, (EngineError, OSError)) else 2


def set_log_level(level: str, log_format: str | None = None) -> None:
    """Write Inflight's log messages of `level` and above to stderr.

    Args:
        log_format: "text" or "json"; by default INFLIGHT_LOG_FORMAT.
    """
    logs.configure("", log_format)
    logging.getLogger("inflight").setLevel(level)


def start_engine(context: typer.Context, args: EngineArgs, verbose: bool) -> LLMEngine:
    """Start an engine, which the caller must close. A test can set `context.obj` to a function, which then makes the engine."""
    if verbose:
        set_log_level("DEBUG")
    if context.obj is not None:
        return cast("Callable[[EngineArgs], LLMEngine]", context.obj)(args)
    from inflight.entrypoints.llm_engine import (
        LLMEngine,  # loads torch, which `--help` and a mistyped option do not need
    )

    engine = LLMEngine.from_args(args)
    gc.collect()
    # Garbage collections then leave out the objects loaded so far. Scanning them would take 100 ms about every 200 steps.
    gc.freeze()
    return engine
