"""`make_vectors`: runs the texts of one HTTP request in the engine, and returns their vectors."""

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from starlette.requests import Request

from inflight.engine.request.processed import ProcessedRequest
from inflight.engine.request.request_state import RequestOutputKind
from inflight.engine.serving.output_stream import OutputStream
from inflight.entrypoints.fields.field_error import FieldError
from inflight.entrypoints.http.generation import last_output
from inflight.entrypoints.http.server import ApiServer, arrival_time, trace_headers, wanted_replica
from inflight.entrypoints.pooled_values import vectors_of
from inflight.errors import ContextLengthExceededError, InvalidRequestError, OverloadedError
from inflight.interface.parts import RequestPart
from inflight.interface.request import Float32Array
from inflight.pooling_params import PoolingParams

_AT_ONCE = 16  # so many texts of a request are tokenised at a time
MAX_RUNNING = 512
RETRY_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorsRequest:
    """
    Attributes:
        prompts: texts or token ids.
        params: of all prompts, or one for each.
        places: where each prompt stands in the request, such as "input[3]", for errors.
        parts: what each prompt brings besides; empty if none does.
    """

    prompts: Sequence[str | list[int]]
    params: PoolingParams | Sequence[PoolingParams]
    places: Sequence[str]
    priority: int = 0
    cache_salt: str = ""
    add_special_tokens: bool = True
    parts: Sequence[tuple[RequestPart, ...]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Vectors:
    """`values`: for each prompt float32 [1, size], or with a vector for each token [num_tokens, size]."""

    values: list[Float32Array]
    num_tokens: int


async def make_vectors(server: ApiServer, http_request: Request, request: VectorsRequest) -> Vectors:
    """All prompts are checked before the first one runs. They end when the caller is cancelled. Of a request with many
    prompts, at most `MAX_RUNNING` are in the engine at a time.

    Raises:
        InvalidRequestError: a prompt or a parameter is wrong, and nothing has run.
        EngineError: a step failed, or a vector is not finite.
        OverloadedError: the queue is full.
    """
    engine, rank = server.engine, wanted_replica(http_request)
    step_tag = engine.input_processor.config.model.pooler.step_tag
    streams: list[OutputStream] = []
    values: list[Float32Array] = []
    try:
        with engine.accepted():  # also during a shutdown, all of an accepted request runs
            engine.check_admission(min(len(request.prompts), MAX_RUNNING))
            processed = await _process(server, http_request, request)
            for first in range(0, len(processed), MAX_RUNNING):
                streams = await _submit(server, processed[first : first + MAX_RUNNING], rank, waits=first > 0)
                server.log_started(http_request, streams)
                values += [vectors_of(await last_output(stream), step_tag) for stream in streams]
        return Vectors(values=values, num_tokens=sum(len(each.prompt_token_ids) for each in processed))
    except OverloadedError:
        if not streams:
            server.metrics.request_refused("queue_full")
        raise
    finally:
        for stream in streams:
            stream.abort()


def places_in(field: str, number: int) -> list[str]:
    """The places of the entries of a list of `number`."""
    return [f"{field}[{index}]" for index in range(number)]


def at_place(error: InvalidRequestError, place: str) -> InvalidRequestError:
    """The error of a text of a request, which stands at `place`."""
    if isinstance(error, ContextLengthExceededError):  # clients know this error by the beginning of its message
        error.param = place
        return error
    return FieldError(place, f"{place}: {error}")


async def _submit(
    server: ApiServer, requests: Sequence[ProcessedRequest], rank: int | None, *, waits: bool
) -> list[OutputStream]:
    """`waits`: if the queue is full, try again, because a part of the HTTP request is computed already."""
    while True:
        try:
            return server.engine.submit_all(
                requests,
                kind=RequestOutputKind.FINAL_ONLY,
                timeout=server.settings.request_timeout,
                data_parallel_rank=rank,
            )
        except OverloadedError:
            if not waits:
                raise
        await asyncio.sleep(RETRY_SECONDS)


async def _process(server: ApiServer, http_request: Request, request: VectorsRequest) -> list[ProcessedRequest]:
    name = f"pool-{uuid.uuid4().hex}"
    arrival, traces = arrival_time(http_request), trace_headers(http_request)

    async def process(index: int, prompt: str | list[int]) -> ProcessedRequest:
        params = request.params if isinstance(request.params, PoolingParams) else request.params[index]
        try:
            return await server.engine.process(
                f"{name}-{index}",
                prompt,
                params,
                priority=request.priority,
                cache_salt=request.cache_salt,
                add_special_tokens=request.add_special_tokens,
                arrival_time=arrival,
                parts=request.parts[index] if request.parts else (),
                trace_headers=traces,
            )
        except InvalidRequestError as error:
            if error.param == "prompt":
                raise at_place(error, request.places[index]) from error
            raise

    found: list[ProcessedRequest] = []
    numbered = enumerate(request.prompts)
    while chunk := list(islice(numbered, _AT_ONCE)):
        found += await asyncio.gather(*(process(index, prompt) for index, prompt in chunk))
    return found
