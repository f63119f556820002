"""`inflight serve`: starts a server with the HTTP API of OpenAI, or only checks its options (--check)."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from inflight import envs, foreign_variables
from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.cli.command import Verbose, command, problems_of, set_log_level, tell
from inflight.entrypoints.cli.layered import checked, source_of
from inflight.entrypoints.cli.options import Options
from inflight.entrypoints.serve.api_keys import read_key_file
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.errors import ConfigError

ENVIRONMENT_PREFIX = "INFLIGHT_SERVE"

EPILOG = """\b
Examples:
  inflight serve
  inflight serve ./my-model --port 9000 --served-model-name my-model
  inflight serve --config serve.yaml --check
  inflight serve --models-dir ./models

Every option but --check may also be set in the environment, as INFLIGHT_SERVE_MAX_MODEL_LEN=4096, or (but --config) in the
file of --config, as max_model_len: 4096. The command line overrides the environment, and both override the file.
docs/serving.md has more.
"""


@command
def serve(
    context: typer.Context,
    given_model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False)
    ] = None,
    config: Annotated[
        str | None, typer.Option(metavar="PATH", is_eager=True, help="YAML file: option names and values.")
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Check the options and the files that they name, report all problems, and exit without reading weights. Exit "
            "code 0 if there is no problem, otherwise 2.",
        ),
    ] = False,
    verbose: Verbose = False,
    *,
    engine: Annotated[dict[str, Any], Options(EngineArgs)],
    server: Annotated[dict[str, Any], Options(ServerSettings)],
) -> None:
    """Serve a model over HTTP, with the APIs of OpenAI, Anthropic and Ollama."""
    set_log_level("DEBUG" if verbose else envs.log_level("INFO"), server["log_format"])
    problems = problems_of(context)
    given = {**server, **engine}
    problems += foreign_variables.refusals(os.environ, given)
    for note in foreign_variables.server_notes(os.environ, given):
        tell("warning", note)
    if server["api_key_file"] is not None:
        try:
            read_key_file(Path(os.path.expanduser(server["api_key_file"])))
        except ConfigError as error:
            problems.append(str(error))
    if given_model is not None:
        if engine["model"] != given_model and source_of(context, "model") == "COMMANDLINE":
            problems.append(f"MODEL is {given_model!r}, but --model is {engine['model']!r}: give only one of the two")
        engine["model"] = given_model
    settings = checked(context, ServerSettings, server)
    args = checked(context, EngineArgs, engine)
    if settings is not None and args is not None and settings.headless:
        for option in Options(ServerSettings).names().values():
            if option not in ("headless", "log_format") and source_of(context, option) == "COMMANDLINE":
                tell("note", f"--{option.replace('_', '-')} has no effect with --headless")
        if args.served_replicas == args.replicas:
            which = "data_parallel_address, data_parallel_size, data_parallel_size_local and data_parallel_start_rank"
            problems.append(f"headless=True: give {which}, but neither data_parallel_hybrid_lb nor data_parallel_rank")
        elif args.data_parallel_address in ("0.0.0.0", "::"):
            problems.append(f"data_parallel_address={args.data_parallel_address!r} with headless=True: give the head's")
    presets: dict[str, Any] = {}
    if settings is not None and settings.serves_several_models:
        if engine["model"] is not None:
            problems.append(f"model={engine['model']!r} with models_dir or models_preset: requests name the model")
        try:
            presets = _read_presets(context, settings)
        except ConfigError as error:
            problems.append(str(error))
    fields = {**Options(EngineArgs).names(), **Options(ServerSettings).names()}

    def is_fixed(field: str) -> bool:
        return source_of(context, fields.get(field, field)) == "COMMANDLINE"

    if check:
        _report(problems, settings, args, presets, is_fixed)
    if problems or settings is None or args is None:
        raise ConfigError("; ".join(problems))
    if settings.headless:
        from inflight.entrypoints.serve.headless import run_headless  # loads numpy, which `--help` does not need

        return run_headless(args)
    if settings.serves_several_models:
        from inflight.entrypoints.router.command import run_router  # loads uvicorn

        run_router(settings, args, presets, is_fixed)
    from inflight.entrypoints.serve.command import run_server  # loads uvicorn, which `--help` does not need

    run_server(settings, args)


def _read_presets(context: typer.Context, settings: ServerSettings) -> dict[str, Any]:  # Any: `Preset`
    """The sections of --models-preset; and whether the folder can be read.

    Raises:
        ConfigError: the file cannot be read, has a wrong value, or does not fit the other options.
    """
    from inflight.entrypoints.router.command import make_catalog
    from inflight.entrypoints.router.presets import read_presets

    command: Any = context.command  # Any: typer's copy of click has no types
    options = {name.lstrip("-") for each in command.params for name in each.opts if name.startswith("--")}

    def read(values: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
        flags = {name for each in command.params if getattr(each, "is_flag", False) for name in each.opts}
        words = [word for name, text in values.items() for word in _as_option(name, text, f"--{name}" in flags)]
        section = command.make_context("preset", words, auto_envvar_prefix=None)
        if problems := problems_of(section):
            raise ConfigError("; ".join(problems))
        given = {name: value for name, value in section.params.items() if source_of(section, name) == "COMMANDLINE"}
        engine, server = (Options(kind).values(given) for kind in (EngineArgs, ServerSettings))
        EngineArgs(**engine)
        ServerSettings(**server)
        return engine, server

    presets = {}
    if settings.models_preset is not None:
        path = Path(os.path.expanduser(settings.models_preset))
        presets = read_presets(path, options, read, lambda text: tell("note", text))
    make_catalog(settings, presets)
    return presets


def _as_option(name: str, text: str, is_flag: bool) -> list[str]:
    """An option of a section as the command line has it.

    Raises:
        ConfigError: the value of a flag is neither true nor false.
    """
    from inflight.entrypoints.router.presets import read_flag

    if not is_flag:
        return [f"--{name}={text}"]
    return [f"--{name}"] if read_flag(name, text) else [f"--no-{name}"]


def _report(
    problems: list[str],
    settings: ServerSettings | None,
    args: EngineArgs | None,
    presets: dict[str, Any],  # Any: `Preset`
    is_fixed: Callable[[str], bool],
) -> None:
    """Checks the files, too. The last three arguments are those of `run_router`."""
    from inflight.entrypoints.serve.check import model_problems, server_problems  # loads tokenizers: slow

    problems += [] if settings is None else server_problems(settings)
    if settings is not None and args is not None and settings.serves_several_models:
        from inflight.entrypoints.router.command import settings_of_models  # loads uvicorn

        try:
            models = {} if problems else settings_of_models(settings, args, presets, is_fixed)
        except ConfigError as error:
            problems.append(str(error))
        else:
            for name, own_args in models.items():
                problems += [f"{name}: {problem}" for problem in model_problems(own_args)]
    elif args is not None:
        problems += model_problems(args)
    for problem in dict.fromkeys(problems):  # a damaged file may be a problem of several checks
        tell("error", problem)
    if not problems:
        typer.echo("no problem found; weights have not been read")
    raise typer.Exit(2 if problems else 0)
