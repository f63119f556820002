"""`within_deadline`: ends the work before a request's first token (body, template, tokenising) at the request's deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from inflight.errors import RequestTimeoutError


@asynccontextmanager
async def within_deadline(arrival: float, timeout: float | None) -> AsyncIterator[None]:
    """
    Args:
        arrival: `time.monotonic()` when the request came.
        timeout: seconds from `arrival` to the deadline; None: no deadline.

    Raises:
        RequestTimeoutError: the time is over.
    """
    try:
        async with asyncio.timeout(None if timeout is None else arrival + timeout - time.monotonic()) as scope:
            yield
    except TimeoutError:
        if not scope.expired():
            raise
        message = f"the request did not begin to run within its deadline of {timeout:g} s"
        raise RequestTimeoutError(message) from None
