"""`inflight trace`: shows what the engine and its ranks did in each step of a workload, as a Chrome trace and as a table."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inflight.config.engine_args import EngineArgs
from inflight.engine.core.chrome_trace import chrome_trace
from inflight.entrypoints.cli.bench import WorkloadOptions, start_for
from inflight.entrypoints.cli.command import Verbose, command
from inflight.entrypoints.cli.workloads import WARM_UP, run

if TYPE_CHECKING:
    from inflight.engine.core.step_figures import RankFigures, Spread, StepFigures

EPILOG = """\b
Examples:
  inflight trace -m ./my-model -o trace.json
  inflight trace -m ./my-model --batch-size 16 --input-len 512 --output-len 128 --no-async-scheduling

Open the file with https://ui.perfetto.dev or chrome://tracing. docs/timeline.md says what the phases and figures mean.
"""


@command
def trace(
    context: typer.Context,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write a Chrome trace to this file.", metavar="FILE")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as a JSON object.")] = False,
    verbose: Verbose = False,
    *,
    workloads: WorkloadOptions,
    engine: EngineArgs,
) -> None:
    """Run workloads (default: decode8) and show what the engine and the ranks did in about the last 1,000 steps.

    Prints the time of each phase, the time for which devices were idle, and the share of the host's work that ran while the
    devices were busy. The requests are those of `inflight bench offline`. The warm-up before them is not counted.
    """
    from inflight.engine.core.step_figures import ENGINE, step_figures  # loads numpy, which `--help` does not need

    chosen = workloads.chosen(default="decode8")
    running, max_token_id = start_for(context, engine, verbose, chosen)
    try:
        run(running, WARM_UP, max_token_id)
        warm_up = running.timeline_events()[ENGINE]
        for each in chosen:
            run(running, each, max_token_id)
        events = running.timeline_events(first_step=1 + max(event.step_id for event in warm_up))
    finally:
        running.close()
    if output is not None:
        output.write_text(json.dumps(chrome_trace(events)) + "\n", encoding="utf-8")
    figures = step_figures(events)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(figures), indent=2))
    else:
        for line in _table(figures):
            typer.echo(line)


def _table(figures: StepFigures) -> Iterator[str]:
    yield f"{'':<24}{'p50 us':>12}{'p99 us':>12}"
    for phase, spread in figures.engine_phases.items():
        yield _row(f"engine  {phase}", spread)
    for name, rank in figures.ranks.items():
        for phase, spread in rank.phases.items():
            yield _row(f"{name}  {phase}", spread)
        yield _row(f"{name}  step period", rank.period)
        yield _row(f"{name}  device idle", rank.idle)
        yield f"{name}  {_summary(rank)}"


def _row(label: str, spread: Spread | None) -> str:
    p50, p99 = ("-", "-") if spread is None else (f"{spread.p50:.1f}", f"{spread.p99:.1f}")
    return f"{label:<24}{p50:>12}{p99:>12}"


def _summary(rank: RankFigures) -> str:
    if rank.idle_share is None:
        return "no figures, because no two steps ran directly after each other"
    hidden = (
        "no host work"
        if rank.hidden_share is None
        else f"{rank.hidden_share:.1%} of the host's work ran while the device was busy"
    )
    return f"device idle for {rank.idle_share:.1%} of {rank.num_periods} periods, {hidden}"
