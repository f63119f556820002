"""What a rank says of its failure."""

from __future__ import annotations

import pytest

from inflight.errors import LostPeerError, SilentPeerError
from inflight.executor.failures import failure_of, first_line


@pytest.mark.parametrize(
    ("error", "is_echo"),
    [(ConnectionResetError("lost rank 1"), True), (TimeoutError("silent"), True), (RuntimeError("bad luck"), False)],
)
def test_what_another_rank_has_caused_is_an_echo(error: Exception, is_echo: bool) -> None:
    assert failure_of(error).is_echo == is_echo


@pytest.mark.parametrize("kind", [LostPeerError, SilentPeerError])
def test_a_failure_names_the_ranks_that_were_lost(kind: type[LostPeerError | SilentPeerError]) -> None:
    error = kind("ranks 2 and 3 are gone", 2, 3)
    assert (str(error), failure_of(error).lost_ranks, failure_of(error).is_echo) == (
        "ranks 2 and 3 are gone",
        (2, 3),
        True,
    )
    wrapped = ConnectionError("the link between the stages is broken")
    wrapped.__cause__ = error
    assert failure_of(wrapped).lost_ranks == (2, 3)
    assert failure_of(ConnectionError("this rank has stopped its communication")).lost_ranks == ()


def test_the_first_line_of_an_error_is_its_message_or_its_name() -> None:
    found = [first_line(ValueError(text)) for text in ("", "one", "one\n\nOn rank 1:\nTraceback")]
    assert found == ["ValueError", "one", "one"]
