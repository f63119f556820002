"""Whose fault it is that a request ended with an error."""

from __future__ import annotations

import pytest

from inflight.entrypoints.openai.errors import to_api_error
from inflight.entrypoints.openai.generation import _check
from inflight.errors import InflightError
from inflight.scheduler.added_tokens import NOTHING_TO_DRAW
from inflight.structured_output.compile_lane import TOO_MANY_GRAMMARS
from tests.unit.entrypoints.openai.outputs import completion, output


@pytest.mark.parametrize(
    ("error", "engine_failed", "status"),
    [
        ("json: it is too complex", False, 400),
        ("", False, 400),
        ("the step failed", True, 500),
        (NOTHING_TO_DRAW, False, 500),  # the model's logits are not finite
        (TOO_MANY_GRAMMARS, False, 503),
    ],
)
def test_an_error_is_the_requests_or_the_servers(error: str, engine_failed: bool, status: int) -> None:
    failed = output(completion("", finish_reason="error"), error=error, engine_failed=engine_failed)
    with pytest.raises(InflightError) as raised:
        _check(failed)
    told = to_api_error(raised.value)
    assert told.status_code == status
    assert ("Retry-After" in (told.headers or {})) is (status == 503)
    _check(output(completion("x", finish_reason="stop")))
