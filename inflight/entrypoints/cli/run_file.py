"""`run_file`: runs the rows of a JSON-lines file, and writes their results to another one, from which it can go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from inflight.entrypoints.cli.batch import Maker, row_key, run_batch
from inflight.entrypoints.cli.result_file import ResultFile
from inflight.entrypoints.cli.rows import STANDARD_STREAM, InputRow, count_rows, open_input, read_rows
from inflight.entrypoints.cli.terminal import InterruptFlag
from inflight.outputs import RequestOutput

if TYPE_CHECKING:
    from inflight.entrypoints.llm_engine import LLMEngine

INTERRUPTED = 130  # a shell reports the same exit code for a process that SIGINT has ended
NOTHING_RUN = 2  # the exit code if no row of the input could be run


def check_files(input: Path, output: Path | None) -> None:
    """Refuse files that cannot be used, before the model is loaded."""
    if input == STANDARD_STREAM:
        return
    if not input.exists():
        raise typer.BadParameter(f"--input {input}: there is no such file; give the path of a JSON-lines file")
    if output is not None and output.exists() and output.samefile(input):
        raise typer.BadParameter("--output is the input file itself; choose another one")


def run_file(
    engine: LLMEngine,
    maker: Maker,
    source: Path,
    target: Path,
    to_row: Callable[[InputRow, RequestOutput], dict[str, Any]],  # Any: JSON
    *,
    overwrite: bool,
) -> None:
    """Results are written when they are ready. Rows that have one are skipped. `to_row` makes the result of a row.

    Raises:
        typer.Exit: the user has interrupted the run, or no row could be run.
    """
    from tqdm import tqdm  # `--help` does not need it

    num_errors, num_results = 0, 0
    with (
        ResultFile(target, overwrite=overwrite) as results,
        open_input(source) as lines,
        InterruptFlag() as interrupt,
        tqdm(total=count_rows(source), unit="row", dynamic_ncols=True, disable=None) as bar,
    ):

        def undone() -> Iterator[InputRow]:
            for row in read_rows(lines):
                if results.is_done(row):
                    bar.update()
                else:
                    yield row

        def on_output(row: InputRow, output: RequestOutput) -> None:
            nonlocal num_results
            if output.finished:
                num_results += 1
                results.write(to_row(row, output))
                bar.update()

        def on_error(row: InputRow, message: str) -> None:
            nonlocal num_errors
            num_errors += 1
            results.write({**row_key(row), "error": message})
            bar.update()

        run_batch(engine, undone(), maker, interrupt, on_output=on_output, on_error=on_error)
    if num_errors:
        typer.echo(f"{num_errors} rows could not be run; their rows in the output have an 'error'", err=True)
    if interrupt.is_set:
        typer.echo("interrupted; to continue, start the same command again", err=True)
        raise typer.Exit(INTERRUPTED)
    if num_errors and not num_results:
        raise typer.Exit(NOTHING_RUN)
