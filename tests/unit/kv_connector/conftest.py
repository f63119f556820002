"""The object store that tests of tiers share, and breakers that do not look at the clock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from inflight.kv_connector import breaker
from tests.support.kv_tier_servers import s3_server


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:  # Any: options as in JSON
    """The options of an obj tier at a server of moto, which has no buckets yet."""
    with s3_server() as options:
        yield options


@pytest.fixture
def patient_breakers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A breaker that has opened stays open: on a busy machine a second is over before the next operation."""
    monkeypatch.setattr(breaker, "FIRST_PAUSE", 300.0)
