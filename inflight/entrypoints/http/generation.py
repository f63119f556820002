"""Starts a validated request (a chat or a completion) in the engine, and sends its answer."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from starlette.requests import Request

from inflight.engine.request.processed import ProcessedRequest
from inflight.engine.request.request_state import RequestOutputKind
from inflight.engine.serving.output_stream import OutputStream
from inflight.entrypoints.fields.field_error import prompt_of_list
from inflight.entrypoints.http.field_names import FieldNames
from inflight.entrypoints.http.presenter import Presenter
from inflight.entrypoints.http.server import ApiServer, arrival_time, trace_headers, wanted_replica
from inflight.entrypoints.http.sse import EventStream
from inflight.entrypoints.http.validated import ValidatedRequest
from inflight.errors import EngineError, ErrorKind, InvalidRequestError, OverloadedError
from inflight.outputs import RequestOutput

MAX_LOGPROBS_OF_ANSWER = 2**19  # log-probabilities that one answer may hold in memory at once: about 100 MB
RETRY_SECONDS = 1  # after an overload that the engine core found: too many grammars waited to be compiled


async def submit(
    server: ApiServer, http_request: Request, request: ValidatedRequest, answer_id: str
) -> list[OutputStream]:
    """Start generating. Returns one stream of outputs for each prompt. A caller that stops reading a stream must abort it.

    Raises:
        InflightError: the request is refused, and nothing has been started.
    """
    engine = server.engine
    rank = wanted_replica(http_request)
    engine.check_admission(len(request.prompts) * request.params.n)  # refuse before thousands of sequences are made
    kind = RequestOutputKind.DELTA if request.presentation.stream else RequestOutputKind.FINAL_ONLY
    # The id is unique in the engine, even if a client sends the same request id twice. The log shows this id.
    request_id = f"{answer_id}-{uuid.uuid4().hex[:8]}"
    processed = []
    for index, prompt in enumerate(request.prompts):
        with prompt_of_list(index, len(request.prompts)):
            processed.append(
                await engine.process(
                    f"{request_id}-{index}",
                    prompt.token_ids if prompt.prepared is None else prompt.prepared,
                    request.params,
                    priority=request.priority,
                    cache_salt=request.cache_salt,
                    thinks_first=request.thinks_first,
                    answer_frame=request.answer_frame,
                    make_parser=request.make_parser,
                    arrival_time=arrival_time(http_request),
                    trace_headers=trace_headers(http_request),
                )
            )
    _check_logprobs(processed, request.presentation.stream)
    return engine.submit_all(processed, kind=kind, timeout=server.settings.request_timeout, data_parallel_rank=rank)


async def whole_answer(streams: Sequence[OutputStream], presenter: Presenter) -> bytes:
    """The body of an answer that is not a stream.

    Raises:
        InflightError: a request has failed.
    """
    outputs = [await last_output(stream) for stream in streams]
    params = streams[0].request.params  # all prompts have the same parameters
    if params.logprobs is not None or params.prompt_logprobs is not None:
        return await asyncio.to_thread(presenter.body, outputs)  # in a thread, so that other streams need not wait
    return presenter.body(outputs)


async def send_events(
    streams: Sequence[OutputStream], presenter: Presenter, events: EventStream, names: FieldNames
) -> None:
    """Send an answer as events, in the order in which the outputs of the prompts come.

    Raises:
        InflightError: a request failed before anything was sent. A later error is sent as an event of the stream.
    """

    async def send_outputs(prompt_index: int, stream: OutputStream) -> None:
        async for output in stream:
            check_output(output)
            if chunks := presenter.chunks(prompt_index, output):
                await events.send(b"".join(chunks))

    try:
        async with events.kept_alive(presenter.keep_alive):
            if opening := presenter.opening():
                await events.send(opening)
            if len(streams) == 1:
                await send_outputs(0, streams[0])
            else:
                await _run_together(send_outputs(index, stream) for index, stream in enumerate(streams))
    except Exception as error:
        if not events.has_started:
            raise
        last = presenter.failure(names.api_error(error))
    else:
        last = presenter.end()
    await presenter.keep()
    await events.finish(last)


def _check_logprobs(requests: Sequence[ProcessedRequest], is_stream: bool) -> None:
    """Refuse an answer that might hold too many log-probabilities at once. Each needs about 200 bytes. In a stream only those
    of the prompt count, because the others are sent as they come."""
    total = 0
    for request in requests:
        params = request.params
        num_sequences = len(request.sequences)
        if params.logprobs is not None and not is_stream:
            total += num_sequences * request.sequences[0].sampling.max_tokens * (1 + params.logprobs)
        if params.prompt_logprobs is not None:
            total += len(request.prompt_token_ids) * (1 + params.prompt_logprobs)
    if total > MAX_LOGPROBS_OF_ANSWER:
        raise InvalidRequestError(
            f"the answer might hold {total} log-probabilities; at most {MAX_LOGPROBS_OF_ANSWER} are allowed: lower max_tokens, "
            "n, logprobs or prompt_logprobs, or set stream to true"
        )


async def _run_together(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run the coroutines at the same time. If one fails, cancel the others and raise its error."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def last_output(stream: OutputStream) -> RequestOutput:
    last = None
    async for output in stream:
        last = output
    assert last is not None and last.finished
    check_output(last)
    return last


def check_output(output: RequestOutput) -> None:
    """
    Raises:
        InvalidRequestError: the request is the cause, for instance because its grammar cannot be compiled.
        EngineError: a step failed, or its logits are not finite.
        OverloadedError: too many grammars wait to be compiled.
    """
    for choice in output.outputs:
        if choice.finish_reason != "error":
            continue
        match output.error_kind:
            case ErrorKind.ENGINE:
                raise EngineError(output.error)
            case ErrorKind.OVERLOAD:
                raise OverloadedError(output.error, retry_after_seconds=RETRY_SECONDS)
            case ErrorKind.REQUEST:
                # the engine core refuses nothing but constraints of the text
                param = output.error_param or "structured_outputs"
                raise InvalidRequestError(output.error or "the request could not be completed", param)
