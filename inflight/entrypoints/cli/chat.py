"""`inflight chat`: a conversation in the terminal. Answers are streamed. Earlier turns stay in the prefix cache."""

import contextlib
import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.cli.batch import GivenSampling, check_sampling, unbounded
from inflight.entrypoints.cli.command import Verbose, command, start_engine
from inflight.entrypoints.cli.conversation import Conversation, EngineConversation, ServedConversation, read_image
from inflight.entrypoints.cli.layered import source_of
from inflight.entrypoints.cli.terminal import TextStream
from inflight.errors import InvalidRequestError
from inflight.logs import escape_controls
from inflight.sampling_params import LOGPROBS_PARAMETERS, SamplingParams
from inflight.setting import settings_of
from inflight.structured_outputs_params import StructuredOutputsParams

HELP = "/reset forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer"

EPILOG = """\b
Examples:
  inflight chat
  inflight chat --url http://127.0.0.1:8000
  inflight chat -m ./my-vision-model --image screenshot.png
  inflight chat -m ./my-model --system "Answer in one sentence." --temperature 0.7
"""


@command
def chat(
    context: typer.Context,
    system: Annotated[
        str | None,
        typer.Option("--system", "-s", metavar="TEXT", help="The system message: instructions for the model."),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="An image before the first question. May be repeated. The model must read images."
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Ask this running server instead of starting an engine. OPENAI_API_KEY in the environment is its key.",
        ),
    ] = None,
    verbose: Verbose = False,
    *,
    sampling: GivenSampling,
    engine: EngineArgs,
) -> None:
    """Talk to a model that has a chat template.

    In the conversation: /reset forgets all messages but the system message, /exit (or Ctrl-D) leaves, Ctrl-C stops the current
    answer only. Without --max-tokens an answer may fill the rest of the context.
    """
    if unusable := sorted({"n", *LOGPROBS_PARAMETERS} & sampling.keys()):
        raise typer.BadParameter(
            f"{unusable[0]} cannot be used here, because a chat shows only the text of one answer: use `inflight generate`"
        )
    check_sampling(sampling)
    images = [read_image(path) for path in image or ()]
    if url is not None:
        of_engine = settings_of(EngineArgs).keys() - settings_of(SamplingParams).keys() - {"model"}
        if given := sorted(name for name in of_engine if source_of(context, name) == "COMMANDLINE"):
            raise typer.BadParameter(f"{given[0]} is an option of an engine, and --url names a server that has one")
        model = {} if engine.model is None else {"model": engine.model}
        _converse(ServedConversation(url, {**model, **_json_fields(sampling)}, system, images))
        return
    running = start_engine(context, dataclasses.replace(engine, skip_tokenizer_init=False), verbose)
    try:
        params = dataclasses.replace(unbounded(running.default_params), **sampling)
        _converse(EngineConversation(running, params, system, images))
    finally:
        running.close()


def _json_fields(sampling: Mapping[str, Any]) -> dict[str, Any]:  # Any: JSON
    """The sampling options as fields of a request to a server."""
    fields = dict(sampling)
    if isinstance(wanted := fields.get("structured_outputs"), StructuredOutputsParams):
        given = {
            field.name: getattr(wanted, field.name) for field in dataclasses.fields(wanted) if field.name != "lenient"
        }
        fields["structured_outputs"] = {name: value for name, value in given.items() if value not in (None, False)}
    return fields


def _converse(conversation: Conversation) -> None:
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  optional; once imported, input() has history and editing
        typer.echo(HELP, err=True)
    while (line := _read_line()) is not None and line.strip() != "/exit":
        _take_turn(conversation, line)


def _take_turn(conversation: Conversation, line: str) -> None:
    text = line.strip()
    if text == "/reset":
        conversation.reset()
        typer.echo("(forgotten)", err=True)
    elif text.startswith("/") and " " not in text:
        typer.echo(HELP, err=True)
    elif text:
        try:
            finished = conversation.answer(line, TextStream(sys.stdout))
        except InvalidRequestError as error:
            typer.echo(f"error: {escape_controls(str(error))} (/reset forgets the conversation)", err=True)
            return
        typer.echo("" if finished else " (stopped)")


def _read_line() -> str | None:
    """The next line of the input, or None at the end of the input. At a terminal, Ctrl-C drops what was typed in the line."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            typer.echo(f"\n{HELP}", err=True)
