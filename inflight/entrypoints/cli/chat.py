"""`inflight chat`: a conversation in the terminal. Answers are streamed. Earlier turns stay in the prefix cache."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.cli.batch import GivenSampling, check_sampling, unbounded
from inflight.entrypoints.cli.command import Verbose, command, start_engine
from inflight.entrypoints.cli.terminal import InterruptFlag, TextStream
from inflight.errors import InvalidRequestError

if TYPE_CHECKING:
    from inflight.engine.llm_engine import LLMEngine
    from inflight.sampling_params import SamplingParams

HELP = "/reset forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer"

EPILOG = """\b
Examples:
  inflight chat
  inflight chat -m ./my-model --system "Answer in one sentence." --temperature 0.7
"""


@command
def chat(
    context: typer.Context,
    system: Annotated[
        str | None,
        typer.Option("--system", "-s", metavar="TEXT", help="The system message: instructions for the model."),
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
    if unusable := sorted({"n", "logprobs", "prompt_logprobs"} & sampling.keys()):
        raise typer.BadParameter(
            f"{unusable[0]} cannot be used here, because a chat shows only the text of one answer: use `inflight generate`"
        )
    check_sampling(sampling)
    running = start_engine(context, dataclasses.replace(engine, skip_tokenizer_init=False), verbose)
    try:
        params = dataclasses.replace(unbounded(running.default_params), **sampling)
        conversation = Conversation(running, params, system)
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  optional; once imported, input() has history and editing
            typer.echo(HELP, err=True)
        while (line := _read_line()) is not None and line.strip() != "/exit":
            _take_turn(conversation, line)
    finally:
        running.close()


class Conversation:
    """The messages so far, and the engine that answers the next message."""

    def __init__(self, engine: LLMEngine, params: SamplingParams, system: str | None) -> None:
        """
        Raises:
            TokenizerError: the model has no chat template.
        """
        self._engine = engine
        self._params = params
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)
        self._request_ids = (f"turn-{turn}" for turn in itertools.count())
        # Raise at once if the model has no chat template.
        engine.render_chat([*self._opening, {"role": "user", "content": "Hello"}])

    def reset(self) -> None:
        self._messages = list(self._opening)

    def answer(self, text: str, stream: TextStream) -> bool:
        """Stream the answer to the user's message `text`. Returns False if Ctrl-C has stopped the answer. The part of a stopped
        answer that was shown stays in the conversation.

        Raises:
            InvalidRequestError: the message cannot be answered. It is left out of the conversation.
        """
        from inflight.engine.request_state import RequestOutputKind  # loads numpy

        messages = [*self._messages, {"role": "user", "content": text}]
        request_id, answer, finished = next(self._request_ids), "", False
        self._engine.add_request(
            request_id,
            {"prompt_token_ids": self._engine.render_chat(messages)},
            self._params,
            kind=RequestOutputKind.CUMULATIVE,
        )
        try:
            with InterruptFlag() as interrupt:
                while not finished and not interrupt.is_set:
                    for output in self._engine.step():
                        answer, finished = output.outputs[0].text, output.finished
                        stream.update(answer)
        finally:
            self._engine.abort_requests([request_id])
        self._messages = [*messages, {"role": "assistant", "content": answer}]
        return finished


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
            typer.echo(f"error: {error} (/reset forgets the conversation)", err=True)
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
