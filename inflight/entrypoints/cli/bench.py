"""`inflight bench offline` measures how fast a model runs on this machine."""

import json
import statistics
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import inflight
from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.cli.command import Verbose, command, start_engine
from inflight.entrypoints.cli.workloads import BY_NAME, MAX_TOKEN_ID, WARM_UP, Workload, run, select
from inflight.errors import ConfigError

if TYPE_CHECKING:
    from inflight.entrypoints.llm_engine import LLMEngine  # loads torch

EPILOG = """\b
Examples:
  inflight bench offline -m ./my-model --workload all --repeat 3 --output results.json
  inflight bench offline -m ./my-model --batch-size 16 --input-len 512 --output-len 128 --load-format dummy
"""

MAX_NUM_SEQS = 64
_size = partial(typer.Option, rich_help_panel="Sizes of your own", metavar="N", min=1, show_default=False)


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """The workloads to run: named workloads, or one workload with the sizes that the user gives."""

    workload: Annotated[
        str | None,
        typer.Option(
            "--workload",
            "-w",
            metavar="NAMES",
            help=f"Names, separated by commas: {', '.join(BY_NAME)}. all means the first five of them, long the others.",
        ),
    ] = None
    batch_size: Annotated[int | None, _size(help="Number of requests.")] = None
    input_len: Annotated[int | None, _size(help="Prompt tokens of each request.")] = None
    output_len: Annotated[int | None, _size(help="Output tokens of each request.")] = None

    def chosen(self, default: str) -> list[Workload]:
        """The workloads that the options choose. If no option is given, `default` is used as the value of --workload.

        Raises:
            typer.BadParameter: there is no workload of that name, or both names and sizes are given.
        """
        if (self.batch_size, self.input_len, self.output_len) == (None, None, None):
            try:
                return select(self.workload or default)
            except ValueError as error:
                raise typer.BadParameter(str(error)) from error
        if self.workload is not None:
            raise typer.BadParameter(
                "--workload cannot be combined with --batch-size, --input-len and --output-len: give names or sizes"
            )
        return [Workload("custom", self.batch_size or 1, self.input_len or 128, self.output_len or 128)]


def start_for(
    context: typer.Context, engine: EngineArgs, verbose: bool, workloads: list[Workload]
) -> "tuple[LLMEngine, int]":
    """Start an engine that can run these workloads and the warm-up. Returns the engine, and the `max_token_id` for `run`."""
    longest = max(each.input_len + each.output_len for each in (*workloads, WARM_UP))
    args = replace(
        engine,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_num_seqs=engine.max_num_seqs or max(MAX_NUM_SEQS, *(each.batch_size for each in workloads)),
        max_model_len=engine.max_model_len or longest,
    )
    max_token_id = _max_token_id(engine) if context.obj is None else MAX_TOKEN_ID
    return start_engine(context, args, verbose), max_token_id


def _max_token_id(engine: EngineArgs) -> int:
    """`MAX_TOKEN_ID`, or the size of the model's vocabulary if this is smaller."""
    from inflight.config.gguf_config import read_model_config  # `--help` does not need it
    from inflight.hub import resolve_model_folder

    vocab_size = read_model_config(resolve_model_folder(engine.model, engine.revision)).get("vocab_size")
    if not isinstance(vocab_size, int):
        raise ConfigError(
            f"config.json: vocab_size={vocab_size!r} is not an integer; it must be the number of tokens in the vocabulary"
        )
    return min(MAX_TOKEN_ID, vocab_size)


@command
def offline(
    context: typer.Context,
    repeat: Annotated[
        int,
        typer.Option(help="How often each workload is run and timed; the median time is reported.", min=1, metavar="N"),
    ] = 1,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the results to this JSON file.", metavar="FILE")
    ] = None,
    verbose: Verbose = False,
    *,
    workloads: WorkloadOptions,
    engine: EngineArgs,
) -> None:
    """Measure how long batches of random token ids take. Sampling is greedy, prefix caching is off, end tokens are ignored.

    Reports output tokens per second. For the workloads prefill* it reports prompt tokens per second. A warm-up comes first and
    is not timed. The default of --max-num-seqs is 64, or the largest batch size if that is more. The default of --max-model-len
    is the length of the longest workload, input and output together.
    """
    chosen = workloads.chosen(default="all")
    start = time.perf_counter()
    running, max_token_id = start_for(context, engine, verbose, chosen)
    startup = time.perf_counter() - start
    typer.echo(f"{'workload':<14}{'batch':>6}{'in':>7}{'out':>6}{'tok/s':>10}{'seconds':>9}")
    results = []
    try:
        run(running, WARM_UP, max_token_id)
        for each in chosen:
            result = _measure([run(running, each, max_token_id) for _ in range(repeat)], each)
            results.append(result)
            sizes = f"{each.name:<14}{each.batch_size:>6}{each.input_len:>7}{each.output_len:>6}"
            typer.echo(f"{sizes}{result['tokens_per_s']:>10.1f}{result['seconds']:>9.2f}")
    finally:
        running.close()
    if output is not None:
        document: dict[str, Any] = {
            "engine": "inflight",
            "version": inflight.__version__,
            "model": engine.model,
            "dtype": engine.dtype,
        }
        document |= {"startup_seconds": round(startup, 2), "results": results}
        output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _measure(seconds: list[float], workload: Workload) -> dict[str, Any]:  # Any: JSON
    median = statistics.median(seconds)
    return {
        "workload": workload.name,
        "batch_size": workload.batch_size,
        "input_len": workload.input_len,
        "output_len": workload.output_len,
        "tokens_per_s": round(workload.num_counted_tokens / median, 1),
        "seconds": round(median, 3),
        "all_seconds": [round(each, 3) for each in seconds],
    }
