"""`invoke`: runs a command line in this process. Typer makes the commands once: that takes longer than most of them run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import typer.main
from typer.testing import CliRunner, Result

from inflight.entrypoints.cli.main import app

COMMAND: Any = typer.main.get_command(app)  # Any: typer keeps this type to itself


def invoke(arguments: Sequence[str], **more: Any) -> Result:
    """`more` are arguments of `CliRunner.invoke`."""
    with mock.patch("typer.testing._get_command", return_value=COMMAND):
        return CliRunner().invoke(app, arguments, **more)
