"""`inflight generate`: runs the prompts of the command line, or of a JSON-lines file. The run of a file can be resumed."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.cli.batch import GivenSampling, RequestMaker, check_sampling, run_batch, to_json
from inflight.entrypoints.cli.command import Verbose, command, start_engine
from inflight.entrypoints.cli.rows import STANDARD_STREAM, InputRow
from inflight.entrypoints.cli.run_file import INTERRUPTED, check_files, run_file
from inflight.entrypoints.cli.terminal import CompletionPrinter, InterruptFlag
from inflight.entrypoints.json_lines import row_to_json
from inflight.errors import InvalidRequestError
from inflight.outputs import RequestOutput
from inflight.sampling_params import LOGPROBS_PARAMETERS

if TYPE_CHECKING:
    from inflight.entrypoints.llm_engine import LLMEngine

EPILOG = """\b
Examples:
  inflight generate -p "What is 2 + 3?" -p "Name a colour." --temperature 0
  inflight generate -m ./my-model --raw -p "Once upon a time" --max-tokens 64
  echo "What is 2 + 3?" | inflight generate
  inflight generate -m ./my-model -i questions.jsonl -o answers.jsonl --max-tokens 512
  echo '{"messages": [{"role": "user", "content": "Hi"}]}' | inflight generate -i - | jq .outputs[0].text
"""


@command
def generate(
    context: typer.Context,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt",
            "-p",
            metavar="TEXT",
            help="A prompt. May be repeated; all prompts run in one batch. Without --prompt and --input, standard input is the "
            "prompt, if it is a pipe or a file.",
        ),
    ] = None,
    input: Annotated[
        Path | None,
        typer.Option("--input", "-i", help="JSON lines, one request each; - is standard input.", metavar="FILE"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="File for the results of --input; - (the default) prints them.", metavar="FILE"
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start --output anew instead of going on with it.")
    ] = False,
    as_chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Give a prompt to the model as a user's message, or as text to be continued. Default: as a message if the "
            "model has a chat template.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print results of --prompt as JSON lines.")] = False,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="Put the token ids into JSON results, too.")] = False,
    verbose: Verbose = False,
    *,
    sampling: GivenSampling,
    engine: EngineArgs,
) -> None:
    """Generate text, for a few prompts or for a file of them.

    A row of --input is a JSON object with one of "prompt" (text), "prompt_token_ids" or "messages" (a chat), and
    optionally "id", "tools" and "params" (sampling parameters that replace those of the command line).

    A row of --output has the line number and the id of its input row. It also has "outputs", or "error" if the row could not
    be run. Results are written when they are ready, not in the order of the rows. If the command is started again, it skips
    the rows that have a result, so an interrupted run can be continued. To find the result of a row, its id is used, or its
    line number if it has no id. The exit code is 2 if no row could be run.
    """
    if not prompt and input is None:
        prompt = _read_prompt(sys.stdin)
    _check_usage(prompt, input, output, overwrite, as_json, sampling)
    check_sampling(sampling)
    running = start_engine(context, engine, verbose)
    try:
        maker = RequestMaker(running, sampling, as_chat=as_chat, streams=input is None and not as_json)
        with_token_ids = token_ids or running.tokenizer is None
        if input is not None:
            to_row = partial(to_json, with_token_ids=with_token_ids)
            run_file(running, maker, input, output or STANDARD_STREAM, to_row, overwrite=overwrite)
        else:
            _run_prompts(running, maker, prompt or [], as_json, with_token_ids)
    finally:
        running.close()


def _read_prompt(source: TextIO) -> list[str]:
    """The text of a pipe or a file as one prompt, without the line break at its end. None if it is empty, or a terminal."""
    if source.isatty():
        return []
    try:
        text = source.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"standard input is not valid UTF-8: {error}") from error
    return [text] if text.strip() else []


def _check_usage(
    prompt: list[str] | None,
    input: Path | None,
    output: Path | None,
    overwrite: bool,
    as_json: bool,
    sampling: GivenSampling,
) -> None:
    """Refuse options that contradict each other, before the model is loaded."""
    if bool(prompt) == (input is not None):
        raise typer.BadParameter(
            "give either --prompt, which may be repeated, or --input, or write a prompt to standard input"
        )
    if input is None and (output is not None or overwrite):
        raise typer.BadParameter(
            "--output and --overwrite need --input; to get results of --prompt as JSON, give --json"
        )
    if input is None and not as_json and sampling.keys() & LOGPROBS_PARAMETERS:
        raise typer.BadParameter("--logprobs and --prompt-logprobs need results in JSON: add --json, or use --input")
    if input is not None:
        check_files(input, output)


def _run_prompts(
    engine: LLMEngine, maker: RequestMaker, prompts: list[str], as_json: bool, with_token_ids: bool
) -> None:
    rows = [InputRow(number, None, {"prompt": prompt}) for number, prompt in enumerate(prompts, 1)]
    printer = CompletionPrinter(sys.stdout, prompts)

    def on_output(row: InputRow, output: RequestOutput) -> None:
        if not as_json:
            printer.update(row.number - 1, output)
        elif output.finished:
            print(row_to_json(to_json(row, output, with_token_ids=with_token_ids)).decode("utf-8"), flush=True)

    def on_error(row: InputRow, message: str) -> None:
        raise InvalidRequestError(message if len(rows) == 1 else f"prompt {row.number}: {message}")

    with InterruptFlag() as interrupt:
        run_batch(engine, iter(rows), maker, interrupt, on_output=on_output, on_error=on_error)
    if interrupt.is_set:
        raise typer.Exit(INTERRUPTED)
