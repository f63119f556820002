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
from inflight.engine.input_processor import ProcessedRequest
from inflight.engine.output_stream import OutputStream
from inflight.engine.request_state import RequestOutputKind
from inflight.entrypoints.openai.errors import to_api_error
from inflight.entrypoints.openai.presenter import DONE, Presenter
from inflight.entrypoints.openai.sse import EventStream, send_json
from inflight.entrypoints.openai.validated import ValidatedRequest
from inflight.errors import EngineError, InvalidRequestError, OverloadedError
from inflight.outputs import RequestOutput
from inflight.scheduler.added_tokens import NOTHING_TO_DRAW
from inflight.structured_output.compile_lane import RETRY_SECONDS, TOO_MANY_GRAMMARS

MAX_LOGPROBS_OF_ANSWER = 2**19  # those that are in memory at once: 100 MB


async def submit(
    engine: AsyncLLM,
    request: ValidatedRequest,
    answer_id: str,
    *,
    arrival_time: float,
    timeout: float | None,
    trace_headers: Mapping[str, str],
) -> list[OutputStream]:
    """Start generating: a stream for every prompt, which `answer` ends.

    Args:
        arrival_time: `time.monotonic()`.
        timeout: seconds from there to the end of all of it; None: no deadline.

    Raises:
        InflightError: nothing runs.
    """
    num_sequences = sum(prompt.params.n for prompt in request.prompts)
    engine.check_admission(num_sequences)  # before thousands of sequences are made
    kind = RequestOutputKind.DELTA if request.presentation.stream else RequestOutputKind.FINAL_ONLY
    # unique in the engine, also where the client gives the same request id twice; the log finds it by that
    request_id = f"{answer_id}-{uuid.uuid4().hex[:8]}"
    processed = [
        await engine.process(
            f"{request_id}-{index}",
            prompt.token_ids,
            prompt.params,
            priority=request.priority,
            cache_salt=request.cache_salt,
            thinks_first=request.thinks_first,
            arrival_time=arrival_time,
            trace_headers=trace_headers,
        )
        for index, prompt in enumerate(request.prompts)
    ]
    _check_logprobs(processed, request.presentation.stream)
    return engine.submit_all(processed, kind=kind, timeout=timeout)


async def answer(
    streams: Sequence[OutputStream],
    presenter: Presenter,
    send: Send,
    *,
    as_events: bool,
    keep_alive: float | None = None,
) -> None:
    """Send a whole answer, or a stream of events.

    Args:
        keep_alive: see `EventStream`.

    Raises:
        InflightError: nothing has been sent yet. Later ones are an event of the stream.
    """
    try:
        if as_events:
            await _send_events(streams, presenter, EventStream(send, keep_alive))
        else:
            outputs = [await _last(stream) for stream in streams]
            if any(_shows_logprobs(stream.request) for stream in streams):
                body = await asyncio.to_thread(presenter.body, outputs)  # it takes long; other streams go on meanwhile
            else:
                body = presenter.body(outputs)
            await send_json(send, body)
    finally:
        for stream in streams:
            stream.abort()


def _shows_logprobs(request: ProcessedRequest) -> bool:
    return request.params.logprobs is not None or request.params.prompt_logprobs is not None


def _check_logprobs(requests: Sequence[ProcessedRequest], is_stream: bool) -> None:
    """Each is some 200 bytes, and all of them are there at once, unless they are streamed.

    Raises:
        InvalidRequestError: there may be too many.
    """
    total = 0
    for request in requests:
        params, num_sequences = request.params, len(request.children)
        if params.logprobs is not None and not is_stream:
            total += num_sequences * request.children[0].sampling.max_tokens * (1 + params.logprobs)
        if params.prompt_logprobs is not None:
            total += len(request.prompt_token_ids) * (1 + params.prompt_logprobs)
    if total > MAX_LOGPROBS_OF_ANSWER:
        raise InvalidRequestError(
            f"the answer might hold {total} log-probabilities; at most {MAX_LOGPROBS_OF_ANSWER} are allowed: lower max_tokens, "
            "n, logprobs or prompt_logprobs, or stream it"
        )


async def _send_events(streams: Sequence[OutputStream], presenter: Presenter, events: EventStream) -> None:
    try:
        async with events.kept_alive(), aclosing(_merged(streams)) as outputs:
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
    """
    Raises:
        InvalidRequestError: the request is the cause; for instance its grammar cannot be compiled.
        EngineError: a step failed, or its logits are not finite.
        OverloadedError: too many grammars wait to be compiled.
    """
    if any(choice.finish_reason == "error" for choice in output.outputs):
        if output.engine_failed or output.error == NOTHING_TO_DRAW:  # no field can forbid every token
            raise EngineError(output.error)
        if output.error == TOO_MANY_GRAMMARS:
            raise OverloadedError(output.error, retry_after_seconds=RETRY_SECONDS)
        raise InvalidRequestError(output.error or "the request could not be completed")
