"""Errors that cross from one process to another."""

from __future__ import annotations

import pytest

from inflight.errors import (
    ConfigError,
    InflightError,
    InvalidRequestError,
    LostPeerError,
    PeerError,
    SilentPeerError,
    error_by_name,
)


@pytest.mark.parametrize("kind", [ConfigError, InvalidRequestError])
def test_an_error_of_another_process_keeps_its_class_and_message(kind: type[InflightError]) -> None:
    error = error_by_name(kind.__name__, "no room")
    assert type(error) is kind and str(error) == "no room"


@pytest.mark.parametrize(
    "name",
    ["StepError", "OverloadedError", "PeerError", "ErrorKind", "Unknown", "annotations", "error_by_name", "ValueError"],
)
def test_what_cannot_be_made_of_a_message_alone(name: str) -> None:
    assert error_by_name(name, "no room") is None


def test_an_error_names_the_ranks_that_are_lost() -> None:
    error = LostPeerError("lost", 2, 5)
    assert (str(error), error.ranks) == ("lost", (2, 5))
    assert isinstance(error, ConnectionError) and isinstance(error, PeerError)
    assert isinstance(SilentPeerError("silent", 1), TimeoutError) and not isinstance(error, TimeoutError)
