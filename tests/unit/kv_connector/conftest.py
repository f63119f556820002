"""The object store that tests of tiers share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.kv_tier_servers import s3_server


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:  # Any: options as in JSON
    """The options of an obj tier at a server of moto, which has no buckets yet."""
    with s3_server() as options:
        yield options
