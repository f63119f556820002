"""An executor of two scripted ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from inflight.executor.multiproc import MultiprocExecutor
from tests.unit.executor.processes import scripted_executor


@pytest.fixture
def executor() -> Iterator[MultiprocExecutor]:
    executor = scripted_executor()
    yield executor
    executor.shutdown()
