"""`StoredResponses`: the `ResponseStore` for an event loop. One thread reads and writes the file, so nothing else waits."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from inflight.entrypoints.response_store.place import StorePlace
from inflight.entrypoints.response_store.store import ResponseStore
from inflight.entrypoints.serve.settings import NO_STORE, ServerSettings

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class StoredResponses:
    """If the file cannot be read or written, requests are answered all the same: `call` returns None. The log says so once,
    until the file can be used again.

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
        self._has_failed = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="response store")

    async def call(self, work: Callable[[ResponseStore], _T]) -> _T | None:
        """What `work` returns, which runs in the thread. None if nothing is stored, or the file cannot be used."""
        if not self.is_on:
            return None
        loop = asyncio.get_running_loop()
        # Even if this task is cancelled, the work is done as a whole.
        return await loop.run_in_executor(self._thread, self._work, work)

    def _work(self, work: Callable[[ResponseStore], _T]) -> _T | None:
        try:
            if self._store is None:
                self._store = self._make()
            found = work(self._store)
        except Exception as error:  # whatever it is, a request must not fail because of it
            if not self._has_failed:
                logger.error("responses cannot be stored or read now: %s: %s", type(error).__name__, error)
            self._has_failed = True
            return None
        self._has_failed = False
        return found

    def _make(self) -> ResponseStore:
        if self._place is None:
            self._place = StorePlace(self._settings)
        settings = self._place.settings
        path = Path(settings.response_store)
        return self._open(path, max_bytes=settings.response_store_bytes, max_seconds=settings.response_store_seconds)
