"""`refused`: a request is refused because of one parameter. The sentence of the error may change, the parameter may not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from inflight.errors import InvalidRequestError


@contextlib.contextmanager
def refused(param: str, *values: object) -> Iterator[pytest.ExceptionInfo[InvalidRequestError]]:
    """The block raises an `InvalidRequestError` about this parameter, whose message has all the values."""
    with pytest.raises(InvalidRequestError) as caught:
        yield caught
    message = str(caught.value)
    assert caught.value.param == param, message
    assert all(str(value) in message for value in values), message
