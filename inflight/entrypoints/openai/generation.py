"""A validated request through the engine, and its answer to the client. The one path of every endpoint that generates.

Whatever ends it (the last token, an error, a client that goes) ends every sequence of it in the engine.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing

from starlette.types import Send

from inflight.engine.async_llm import AsyncLLM
from inflight.engine.output_stream import OutputStream
from inflight.engine.request_state import RequestOutputKind
from inflight.entrypoints.openai.errors import to_api_error
from inflight.entrypoints.openai.presenter import DONE, Presenter
from inflight.entrypoints.openai.sse import EventStream, send_json
from inflight.entrypoints.openai.validated import ValidatedRequest
from inflight.errors import InvalidRequestError
from inflight.outputs import RequestOutput


async def answer(
    engine: AsyncLLM,
    request: ValidatedRequest,
    presenter: Presenter,
    send: Send,
    *,
    timeout: float | None,
    trace_headers: Mapping[str, str],
) -> None:
    """Generate, and send a whole answer or a stream of events.

    Args:
        timeout: seconds from now to the end of all of it; None: no deadline.

    Raises:
        InflightError: nothing has been sent yet. Later ones are an event of the stream.
    """
    shown = request.presentation
    kind = RequestOutputKind.DELTA if shown.stream else RequestOutputKind.FINAL_ONLY
    # unique in the engine, also where the client gives the same request id twice; the log finds it by that
    request_id = f"{presenter.id}-{uuid.uuid4().hex[:8]}"
    processed = [
        await engine.process(
            f"{request_id}-{index}",
            prompt.token_ids,
            prompt.params,
            priority=request.priority,
            cache_salt=request.cache_salt,
            trace_headers=trace_headers,
        )
        for index, prompt in enumerate(request.prompts)
    ]
    streams: list[OutputStream] = []
    try:
        for each in processed:
            streams.append(engine.submit(each, kind=kind, timeout=timeout))
        if shown.stream:
            await _send_events(streams, presenter, EventStream(send))
        else:
            await send_json(send, presenter.body([await _last(stream) for stream in streams]))
    finally:
        for stream in streams:
            stream.abort()


async def _send_events(streams: Sequence[OutputStream], presenter: Presenter, events: EventStream) -> None:
    try:
        async with aclosing(_merged(streams)) as outputs:
            async for prompt_index, output in outputs:
                _check(output)
                if chunks := presenter.chunks(prompt_index, output):
                    await events.send("".join(chunks).encode("utf-8"))
    except Exception as error:
        if not events.has_started:
            raise
        await events.finish(b"data: " + to_api_error(error).body() + b"\n\n" + DONE)
        return
    usage = presenter.usage_chunk()
    await events.finish((usage or "").encode("utf-8") + DONE)


async def _merged(streams: Sequence[OutputStream]) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """The outputs of all, each with its stream's index, as they come."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    waiting = {asyncio.ensure_future(_next(stream)): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = waiting.pop(task)
                found = task.result()
                if found is not None:
                    waiting[asyncio.ensure_future(_next(streams[index]))] = index
                    yield index, found
    finally:
        for task in waiting:
            task.cancel()
        if waiting:
            await asyncio.wait(waiting)


async def _next(stream: OutputStream) -> RequestOutput | None:
    return await anext(stream, None)


async def _last(stream: OutputStream) -> RequestOutput:
    last = None
    async for output in stream:
        last = output
    assert last is not None and last.finished
    _check(last)
    return last


def _check(output: RequestOutput) -> None:
    """A completion fails on its own request only: a grammar that cannot be compiled, nothing left to draw."""
    if any(choice.finish_reason == "error" for choice in output.outputs):
        raise InvalidRequestError(output.error or "the request could not be completed")
