"""`inflight bench serve`: measures a server under load, with the options and result names of vLLM's `bench serve`."""

from __future__ import annotations

import typer

from inflight.bench_serve.options import (
    DatasetOptions,
    ResultOptions,
    SamplingBodyOptions,
    ServerOptions,
    TrafficOptions,
)
from inflight.entrypoints.cli.command import command

EPILOG = """\b
Examples:
  inflight bench serve --num-prompts 200 --request-rate 10 --goodput "ttft:200 tpot:50"
  inflight bench serve --input-len 1024 --range-ratio 0.5 --prefix-len 512 --num-prefixes 4 --max-concurrency 32
  inflight bench serve --base-url http://gpu-7:8000 --save-result --save-detailed --plot latencies.png

Needs the extra "bench". docs/bench-serve.md says what the figures mean.
"""


@command
def serve(
    *,
    server: ServerOptions,
    dataset: DatasetOptions,
    traffic: TrafficOptions,
    sampling: SamplingBodyOptions,
    result: ResultOptions,
) -> None:
    """Send requests to an OpenAI-compatible server, each at its planned time, and time the answers."""
    from inflight.bench_serve.report import save, table  # needs the extra "bench", which `--help` does not need
    from inflight.bench_serve.run import run

    if result.plot is not None:
        from inflight.bench_serve.plot import plot_latencies  # if matplotlib is missing, fails before the measurement
    load, figures = run(server, dataset, traffic, sampling, result)
    for line in table(figures, result):
        typer.echo(line)
    if result.save_result:
        typer.echo(f"Result: {save(figures, result)}")
    if result.plot is not None:
        plot_latencies(result.plot, f"{figures['model_id']}: {figures['completed']} requests", load.records)
        typer.echo(f"Plot: {result.plot}")
    if not figures["completed"]:
        raise ConnectionError("every request failed")
