"""`inflight env`: what this installation and this machine are, for people and for bug reports."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from inflight.entrypoints.cli.command import command


@command
def env(as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False) -> None:
    """Show versions, processor, memory and the models that can be served."""
    from inflight.entrypoints.cli.machine_report import make_report, to_text  # not for `--help`

    report = make_report()
    typer.echo(json.dumps(report, indent=2) if as_json else to_text(report))
