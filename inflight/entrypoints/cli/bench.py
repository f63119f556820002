"""`inflight bench`: how fast a model runs here. `offline` times fixed batches of random token ids."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import typer

import inflight
from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.cli.command import Verbose, command
from inflight.entrypoints.cli.workload_options import WorkloadOptions, start_for
from inflight.entrypoints.cli.workloads import WARM_UP, Workload, run

EPILOG = """\b
Examples:
  inflight bench offline -m ./my-model --workload all --repeat 3 --output results.json
  inflight bench offline -m ./my-model --batch-size 16 --input-len 512 --output-len 128 --load-format dummy
"""


@command
def offline(
    context: typer.Context,
    repeat: Annotated[
        int, typer.Option(help="How often each workload is timed; the median counts.", min=1, metavar="N")
    ] = 1,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the results to this JSON file.", metavar="FILE")
    ] = None,
    verbose: Verbose = False,
    *,
    workloads: WorkloadOptions,
    engine: EngineArgs,
) -> None:
    """Time batches of random token ids: greedy, past every end token, without prefix caching.

    Reports output tokens per second, prompt tokens per second for prefill*. The first run is an untimed warm-up. Engine
    options left out are those of the comparison with other engines: at most 64 sequences, and the longest workload's length.
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
