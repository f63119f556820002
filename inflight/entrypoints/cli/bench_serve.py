"""`inflight bench serve` measures a server under load, with the package `inflight_bench`.

Most of its options and results have the same names as in vLLM's `bench serve`.
"""

from typing import Annotated, Any

import typer

from inflight.entrypoints.cli.command import GroupedHelp, command
from inflight.entrypoints.cli.options import Options
from inflight.sampling_params import SamplingParams
from inflight_bench.options import (
    BODY_FIELDS,
    BodyOptions,
    DatasetOptions,
    ResultOptions,
    ServerOptions,
    TrafficOptions,
)

EPILOG = """\b
Examples:
  inflight bench serve --num-prompts 200 --request-rate 10 --goodput "ttft:200 tpot:50"
  inflight bench serve --input-len 1024 --range-ratio 0.5 --prefix-len 512 --num-prefixes 4 --max-concurrency 32
  inflight bench serve --base-url http://gpu-7:8000 --save-result --save-detailed --plot latencies.png

Needs the extra "bench". docs/bench-serve.md says what the figures mean.
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command("serve", cls=GroupedHelp, epilog=EPILOG)
@command
def serve(
    *,
    server: ServerOptions,
    dataset: DatasetOptions,
    traffic: TrafficOptions,
    sampling: Annotated[dict[str, Any], Options(SamplingParams, only=BODY_FIELDS, only_given=True)],
    body: BodyOptions,
    result: ResultOptions,
) -> None:
    """Send requests to an OpenAI-compatible server, each at its planned time, and time the answers."""
    from inflight_bench.report import save, table  # needs the extra "bench", which `--help` does not need
    from inflight_bench.run import run as run_load

    if result.plot is not None:
        # imported before the measurement, so that a missing matplotlib is reported at once
        from inflight_bench.plot import plot_latencies
    load, figures = run_load(server, dataset, traffic, body.body(sampling, dataset.dataset_name), result)
    for line in table(figures, result):
        typer.echo(line)
    if result.save_result:
        typer.echo(f"Result: {save(figures, result)}")
    if result.plot is not None:
        plot_latencies(result.plot, f"{figures['model_id']}: {figures['completed']} requests", load.records)
        typer.echo(f"Plot: {result.plot}")
    if not figures["completed"]:
        raise ConnectionError("every request failed")
