"""What is logged about options that have no effect."""

from __future__ import annotations

import pytest

from inflight.config.engine_args import EngineArgs
from inflight.engine.start.model_files import resolve_config


@pytest.mark.parametrize("name", ["llguidance", "guidance", "auto", "xgrammar", "outlines", "lm-format-enforcer"])
def test_another_library_of_structured_outputs_is_accepted_and_told_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    resolve_config(EngineArgs(structured_outputs_backend=name))
    told = [record.getMessage() for record in caplog.records if "structured_outputs_backend" in record.getMessage()]
    is_other = name in ("xgrammar", "outlines", "lm-format-enforcer")
    assert told == ([f"structured_outputs_backend={name!r}: llguidance serves instead"] if is_other else [])
