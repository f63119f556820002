"""Errors that cross from one process to another."""

from __future__ import annotations

import pytest

from inflight.errors import (
    CheckpointError,
    ConfigError,
    ContextLengthExceededError,
    EngineDeadError,
    EngineError,
    InflightError,
    InvalidRequestError,
    LostPeerError,
    OverloadedError,
    PeerError,
    RankError,
    RequestTimeoutError,
    SilentPeerError,
    StepError,
    StepTimeoutError,
    UnsupportedModelError,
    WorkerDiedError,
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


def test_an_error_of_a_rank_says_where_it_was() -> None:
    error = StepError("broken", rank=3, step_id=7, request_ids=["a", "b"], type_name="ValueError", lost_ranks=[1])
    assert (str(error), error.rank, error.step_id) == ("broken", 3, 7)
    assert (error.request_ids, error.lost_ranks, error.is_echo, error.worker_traceback) == (("a", "b"), (1,), False, "")
    assert error.summary == "a step failed on rank 3 (ValueError)"
    error = StepError("broken", rank=0, worker_traceback="Traceback ...", is_echo=True)
    assert (str(error), error.worker_traceback) == ("broken\nTraceback ...", "Traceback ...")
    assert (error.step_id, error.request_ids, error.is_echo) == (None, (), True)
    assert error.summary == "a step failed on rank 0"


def test_a_client_sees_no_text_of_an_exception() -> None:
    for kind, text in (
        (RankError, "rank 2 failed"),
        (StepTimeoutError, "rank 2 did not answer in time"),
        (WorkerDiedError, "rank 2 has died"),
    ):
        assert kind("/secret/path", rank=2, worker_traceback="/secret").summary == text
    assert EngineDeadError("/secret/path").summary == ""
    assert EngineDeadError("/secret/path", summary="rank 2 has died").summary == "rank 2 has died"


def test_errors_that_have_numbers() -> None:
    long = ContextLengthExceededError("too long", 9)
    assert (str(long), long.num_tokens, ContextLengthExceededError("too long").num_tokens) == ("too long", 9, 0)
    busy = OverloadedError("later", retry_after_seconds=4)
    assert (str(busy), busy.retry_after_seconds) == ("later", 4)


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (ConfigError, ValueError),
        (InvalidRequestError, ValueError),
        (ContextLengthExceededError, InvalidRequestError),
        (UnsupportedModelError, ConfigError),
        (CheckpointError, ConfigError),
        (RequestTimeoutError, TimeoutError),
        (EngineError, RuntimeError),
        (RankError, EngineError),
        (StepTimeoutError, TimeoutError),
        (WorkerDiedError, RankError),
        (EngineDeadError, EngineError),
    ],
)
def test_what_an_error_is_caught_as(kind: type[Exception], base: type[Exception]) -> None:
    assert issubclass(kind, base) and issubclass(kind, InflightError)


def test_errors_of_one_request_are_no_errors_of_the_engine() -> None:
    for kind in (ConfigError, InvalidRequestError, OverloadedError, RequestTimeoutError):
        assert not issubclass(kind, EngineError)
