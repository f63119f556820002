"""`inflight embed`: makes vectors of the texts of a JSON-lines file. A run can be resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.cli.batch import row_key
from inflight.entrypoints.cli.command import Verbose, command, start_engine
from inflight.entrypoints.cli.options import Options
from inflight.entrypoints.cli.rows import STANDARD_STREAM, InputRow
from inflight.entrypoints.cli.run_file import check_files, run_file
from inflight.entrypoints.whole_numbers import as_integers
from inflight.errors import ConfigError, EngineError, InvalidRequestError
from inflight.outputs import RequestOutput
from inflight.pooling_params import PoolingParams

if TYPE_CHECKING:
    from inflight.engine.request.prompt import Prompt
    from inflight.entrypoints.llm_engine import LLMEngine
    from inflight.entrypoints.prepared_ahead import Request

GivenPooling = Annotated[
    dict[str, Any],
    Options(PoolingParams, only=("dimensions", "use_activation", "truncate_prompt_tokens"), only_given=True),
]
NPY = ".npy"
_KEYS = ("text", "prompt_token_ids")

EPILOG = """\b
Examples:
  echo '{"text": "A dog and a cat."}' | inflight embed -i - -o -
  inflight embed -m BAAI/bge-small-en-v1.5 -i texts.jsonl -o vectors.npy --truncate-prompt-tokens -1
"""


@command
def embed(
    context: typer.Context,
    input: Annotated[
        Path, typer.Option("--input", "-i", help="JSON lines, one text each; - is standard input.", metavar="FILE")
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="FILE.npy: an array with a row for each input row, in their order. Any other name: JSON lines; - prints them.",
            metavar="FILE",
        ),
    ] = STANDARD_STREAM,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start --output anew instead of going on with it.")
    ] = False,
    prompt_name: Annotated[
        str | None,
        typer.Option(
            "--prompt-name",
            help="Put this prompt of the model before each text, such as query. Default: the model's default prompt.",
            metavar="NAME",
        ),
    ] = None,
    verbose: Verbose = False,
    *,
    pooling: GivenPooling,
    engine: EngineArgs,
) -> None:
    """Make a vector of each text of a file.

    A row of --input is a JSON object with "text" or "prompt_token_ids", and optionally "id". A row of --output has the
    line number and the id of its input row, and "embedding", or "error" if the row could not be run. If the command is started
    again, it skips the rows that have a result.

    With --output FILE.npy the results are kept in FILE.npy.jsonl until all are there. The array is float32; rows that could not
    be run are NaN.
    """
    check_files(input, output)
    params = PoolingParams(task="embed", **pooling)
    is_array = output.suffix == NPY
    if is_array and input == STANDARD_STREAM:
        raise typer.BadParameter("--output FILE.npy needs an input file, because standard input can be read only once")
    running = start_engine(context, engine, verbose)
    try:
        maker = _EmbedMaker(running, params, prompt_name)
        target = output.with_name(f"{output.name}.jsonl") if is_array else output
        run_file(running, maker, input, target, _to_row, overwrite=overwrite)
        if is_array:
            _write_array(
                target, output, running.model_config.pooler.size(running.model_config.architecture.hidden_size)
            )
    finally:
        running.close()


class _EmbedMaker:
    def __init__(self, engine: LLMEngine, params: PoolingParams, prompt_name: str | None) -> None:
        """
        Raises:
            InvalidRequestError: the model has no prompt of this name.
        """
        self._params = params
        self._before = engine.model_config.pooler.text_before(prompt_name)

    def make(self, row: InputRow) -> Request:
        """See `Maker`."""
        if row.problem:
            raise InvalidRequestError(row.problem)
        if unknown := sorted(set(row.fields) - set(_KEYS)):
            raise InvalidRequestError(f"unknown key {unknown[0]!r}; known keys are 'id', 'text' and 'prompt_token_ids'")
        given = [key for key in _KEYS if key in row.fields]
        if len(given) != 1:
            raise InvalidRequestError(
                f"a row must have 'text' or 'prompt_token_ids', but this one has {given or 'none'}"
            )
        value: Any = row.fields[given[0]]  # Any: JSON, checked by the engine
        token_ids: Any = as_integers(value)  # Any: as above
        prompt: Prompt = {"prompt_token_ids": token_ids}
        if given[0] == "text":
            if not isinstance(value, str):
                raise InvalidRequestError(f"text is a {type(value).__name__}; it must be a string")
            prompt = {"prompt": self._before + value}
        return str(row.number), prompt, self._params, {}


def _to_row(row: InputRow, output: RequestOutput) -> dict[str, Any]:  # Any: JSON
    from inflight.entrypoints.pooled_values import vectors_of  # loads numpy

    try:
        vector: list[float] = vectors_of(output)[0].tolist()
    except EngineError as error:
        return {**row_key(row), "error": str(error)}
    return {**row_key(row), "embedding": vector, "num_prompt_tokens": len(output.prompt_token_ids)}


def _write_array(results: Path, target: Path, size: int) -> None:
    """Write the array whole or not at all, and remove the results that it was made from."""
    import numpy as np

    numbers, width = set[int](), size
    for found in _read(
        results
    ):  # twice, because the vectors as numbers of Python would take eight times as much memory
        numbers.add(found["row"])
        width = len(found.get("embedding") or ()) or width
    places = {number: place for place, number in enumerate(sorted(numbers))}
    unfinished = target.with_name(f"{target.name}.tmp")
    try:
        if places:
            array = np.lib.format.open_memmap(unfinished, mode="w+", dtype=np.float32, shape=(len(places), width))
            array[:] = np.nan
            for found in _read(results):
                if found.get("embedding") is not None:
                    array[places[found["row"]]] = found["embedding"]
            array.flush()
        else:
            with unfinished.open("wb") as file:
                np.save(file, np.empty((0, width), np.float32))
        unfinished.replace(target)
    except OSError as error:
        raise ConfigError(
            f"--output {target} cannot be written: {error.strerror}; the results are in {results}"
        ) from error
    results.unlink()


def _read(results: Path) -> Iterator[dict[str, Any]]:  # Any: JSON
    with results.open("rb") as lines:
        for line in lines:
            yield json.loads(line)
