"""`StoredResponses`: the `ResponseStore` for an event loop. One thread reads and writes the file, so nothing else waits."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from inflight.counted_warning import CountedWarning
from inflight.entrypoints.http.errors import ApiError
from inflight.entrypoints.response_store.place import StorePlace
from inflight.entrypoints.response_store.store import ResponseStore
from inflight.entrypoints.serve.settings import NO_STORE, ServerSettings

logger = logging.getLogger(__name__)

LOG_SECONDS = 60.0  # between two lines of the log about a file that cannot be used
WAIT_SECONDS = 10.0  # how long a call waits for calls before it and for other processes that write

_T = TypeVar("_T")


class StoreFailedError(ApiError):
    """The file cannot be read or written now. The log says why."""

    def __init__(self) -> None:
        super().__init__(
            503,
            "stored responses cannot be read or written now: try again later, or send a request that needs none of them",
            type="server_error",
            code="response_store_failed",
        )


class StoredResponses:
    """If the file is removed or replaced while it is used, the file that is there now is used.

    Args:
        settings: if `response_store` is "temporary", the file is only for this object. A server with several processes has a
            `StorePlace` instead.

    Attributes:
        is_on: whether responses are stored at all.
    """

    def __init__(self, settings: ServerSettings, open_store: Callable[..., ResponseStore] = ResponseStore) -> None:
        self.is_on = settings.response_store != NO_STORE
        self._settings = settings
        self._open = open_store
        self._place: StorePlace | None = None
        self._store: ResponseStore | None = None
        self._failures = CountedWarning(logger, LOG_SECONDS, logging.ERROR)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="response store")

    async def call(self, work: Callable[[ResponseStore], _T]) -> _T | None:
        """What `work` returns, which runs in the thread. None if nothing is stored at all.

        Raises:
            StoreFailedError: the file cannot be used now.
        """
        if not self.is_on:
            return None
        loop = asyncio.get_running_loop()
        # Even if this task is cancelled, the work is done as a whole.
        return await loop.run_in_executor(self._thread, self._work, work, time.monotonic() + WAIT_SECONDS)

    def _work(self, work: Callable[[ResponseStore], _T], wait_until: float) -> _T:
        try:
            store = self._opened()
            store.wait_at_most(wait_until - time.monotonic())
            return work(store)
        except Exception as error:  # whatever it is: who does not need the file goes on without it
            self._failures.log("responses cannot be stored or read now: %s: %s", type(error).__name__, error)
            raise StoreFailedError from error

    def _opened(self) -> ResponseStore:
        if self._store is not None and not self._store.is_in_place():
            logger.warning(
                "the file of stored responses was removed or replaced: what was stored in it is not found now"
            )
            self._store.close()
            self._store = None
        if self._store is None:
            self._store = self._make()
        return self._store

    def _make(self) -> ResponseStore:
        if self._place is None:
            self._place = StorePlace(self._settings)
        settings = self._place.settings
        if settings.response_store == NO_STORE:
            raise OSError("there is no folder for temporary files")
        path = Path(settings.response_store)
        return self._open(path, max_bytes=settings.response_store_bytes, max_seconds=settings.response_store_seconds)
