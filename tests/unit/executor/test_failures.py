"""What a rank says of its failure."""

from __future__ import annotations

import pytest

from inflight.executor.failures import failure_of


@pytest.mark.parametrize(
    ("error", "is_echo"),
    [(ConnectionResetError("lost rank 1"), True), (TimeoutError("silent"), True), (RuntimeError("bad luck"), False)],
)
def test_what_another_rank_has_caused_is_an_echo(error: Exception, is_echo: bool) -> None:
    assert failure_of(error).is_echo == is_echo
