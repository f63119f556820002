"""`prompt_progress`: tells the client of a stream how much of its prompt is computed, until the first token.

The numbers are those of the engine's views (`EngineViews`), so an engine makes views while such a request waits for its first
token: at most ten a second for all of them.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager

from inflight.engine.serving.engine_client import EngineClient
from inflight.engine.serving.output_stream import OutputStream
from inflight.entrypoints.http.presenter import Presenter
from inflight.entrypoints.http.sse import EventStream
from inflight.interface.engine_view import COLUMNS, EngineView

_COMPUTED, _CACHED, _EMITTED = (COLUMNS.index(name) for name in ("computed", "cached", "emitted"))


class _Progress:
    """Of one prompt: the newest numbers, and whether they were told."""

    def __init__(self, request_id: str) -> None:
        self.news = asyncio.Event()
        self.processed = 0
        self.cached = 0
        self._request_id = request_id

    def take(self, view: EngineView) -> None:
        if self._request_id not in view.request_ids:
            return
        row = view.requests[view.request_ids.index(self._request_id)].tolist()
        if row[_COMPUTED] > self.processed and not row[_EMITTED]:
            self.processed = row[_COMPUTED]
            self.cached = row[_CACHED]
            self.news.set()


@asynccontextmanager
async def prompt_progress(
    engines: Sequence[EngineClient], stream: OutputStream, presenter: Presenter, events: EventStream
) -> AsyncIterator[None]:
    """While the `with` block sends the stream, send the presenter's events about the prompt. The first one is sent at once,
    with 0 tokens. If the request has several answers, the first of them computes the prompt."""
    progress = _Progress(stream.request.sequences[0].request_id)
    num_tokens = len(stream.request.prompt_token_ids)
    begin = time.monotonic()

    async def tell() -> None:
        while not presenter.has_begun:
            milliseconds = 1000 * (time.monotonic() - begin)
            await events.send(presenter.progress(num_tokens, progress.cached, progress.processed, milliseconds))
            await progress.news.wait()
            progress.news.clear()

    with ExitStack() as watches:
        for engine in engines:
            watches.enter_context(engine.views.watched(progress.take))
        telling = asyncio.ensure_future(tell())
        try:
            yield
        finally:
            telling.cancel()
            await asyncio.wait((telling,))
