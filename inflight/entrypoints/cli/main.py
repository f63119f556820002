"""The console script: `inflight COMMAND`."""

import os
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import inflight
from inflight import envs, foreign_variables
from inflight.entrypoints.cli import bench, chat, embed, env, generate, launch, models, serve, trace, worker
from inflight.entrypoints.cli.command import (
    HELP_SETTINGS,
    Commands,
    GenerateCommand,
    GroupedHelp,
    ModelCommand,
    Verbose,
    command,
    set_log_level,
    tell,
)
from inflight.entrypoints.cli.layered import LayeredCommand
from inflight.entrypoints.cli.terminal import open_standard_streams

EPILOG = """\b
Examples:
  inflight generate -p "What is 2 + 3?"
  inflight generate -m ./my-model -i questions.jsonl -o answers.jsonl
  inflight chat -m ./my-model
  inflight serve ./my-model

Without --model the commands run the small model that is part of the installation. Exit codes: 1 the engine or the machine
failed, 2 an option or the input is wrong, 130 interrupted.
"""


def print_version() -> None:
    """Print the version, as `inflight --version`."""
    typer.echo(f"inflight {inflight.__version__}")


def print_help(
    context: typer.Context,
    command_names: Annotated[list[str] | None, typer.Argument(metavar="[COMMAND]", help="A command.")] = None,
) -> None:
    """Show the help of a command, as `inflight COMMAND --help`."""
    found = context.find_root()
    for name in command_names or ():
        group: Any = found.command  # Any: typer's copy of click has no types
        if not isinstance(group, TyperGroup):
            break
        _, child, _ = group.resolve_command(found, [name])
        assert child is not None  # an unknown name has raised an error
        found = child.context_class(child, info_name=name, parent=found)
    typer.echo(found.get_help())


app = typer.Typer(
    name="inflight",
    help="Inflight serves large language models over HTTP. It also generates text, embeds, chats, and measures speed.",
    epilog=EPILOG,
    rich_markup_mode=None,
    no_args_is_help=True,
    cls=Commands,
    pretty_exceptions_enable=False,  # a traceback means a bug in Inflight; plain text can be pasted into an issue
    context_settings=HELP_SETTINGS,
)


class BenchCommands(Commands):
    """Imports `bench serve` when it is called or listed: no other command needs the package `inflight_bench`."""

    def list_commands(self, ctx: Any) -> list[str]:  # Any: typer's copy of click has no types
        return [*super().list_commands(ctx), "serve"]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # Any: as above
        if cmd_name != "serve":
            return super().get_command(ctx, cmd_name)
        from inflight.entrypoints.cli import bench_serve

        return typer.main.get_command(bench_serve.app)


bench_app = typer.Typer(cls=BenchCommands, no_args_is_help=True, rich_markup_mode=None)

app.command("generate", cls=GenerateCommand, epilog=generate.EPILOG)(generate.generate)
app.command("embed", cls=ModelCommand, epilog=embed.EPILOG)(embed.embed)
app.command("chat", cls=ModelCommand, epilog=chat.EPILOG)(chat.chat)
app.command(
    "serve",
    cls=LayeredCommand,
    epilog=serve.EPILOG,
    context_settings={**HELP_SETTINGS, "auto_envvar_prefix": serve.ENVIRONMENT_PREFIX},
)(serve.serve)
app.command("launch", cls=GroupedHelp, epilog=launch.EPILOG)(launch.launch)
app.command("pull", cls=GroupedHelp, epilog=models.PULL_EPILOG)(models.pull)
app.command("list", cls=GroupedHelp)(models.list_models)
app.command("show", cls=GroupedHelp)(models.show)
app.command("rm", cls=GroupedHelp)(models.remove)
app.command("ps", cls=GroupedHelp)(models.running)
app.command("trace", cls=ModelCommand, epilog=trace.EPILOG)(trace.trace)
app.command("worker", cls=ModelCommand, epilog=worker.EPILOG)(worker.worker)
app.command("env", cls=GroupedHelp)(env.env)
app.command("version", cls=GroupedHelp, hidden=True)(print_version)
app.command("help", hidden=True)(print_help)
app.add_typer(bench_app, name="bench", help="Measure the speed of a model on this machine, or of a server under load.")
bench_app.command("offline", cls=ModelCommand, epilog=bench.EPILOG)(bench.offline)


def _print_version(wanted: bool) -> None:
    if wanted:
        print_version()
        raise typer.Exit


@app.callback()
@command
def inflight_options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    set_log_level("DEBUG" if verbose else envs.log_level())
    others = {name: value for name, value in os.environ.items() if not name.startswith(f"{serve.ENVIRONMENT_PREFIX}_")}
    for warning in envs.unknown_variables(others, envs.NAMES):
        tell("warning", warning)
    if context.invoked_subcommand in ("serve", "env"):  # `serve` knows more, and names them itself
        return
    for note in foreign_variables.engine_notes(os.environ):
        tell("warning", note)


def main() -> None:
    """The function that the script `inflight` calls (`pyproject.toml` names it)."""
    open_standard_streams()
    app()
