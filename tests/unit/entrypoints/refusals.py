"""`refused`: a field of a request is wrong. Tests compare the class and the field, and not the sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from inflight.entrypoints.fields.field_error import FieldError


@contextmanager
def refused(field: str) -> Iterator[None]:
    with pytest.raises(FieldError) as raised:
        yield
    assert raised.value.param == field
