"""`ApiServer`: the engine, settings and model names that all endpoints share; and functions for a request's id and deadline."""

import asyncio
import hashlib
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from starlette.requests import Request

import inflight
from inflight.engine.serving.async_llm import AsyncLLM
from inflight.engine.serving.output_stream import OutputStream
from inflight.entrypoints.fields.images import RequestImages
from inflight.entrypoints.fields.strict_model import IgnoredFields
from inflight.entrypoints.http.errors import ApiError
from inflight.entrypoints.http.tool_support import ToolSupport
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.errors import InvalidRequestError, RequestTimeoutError
from inflight.metrics.log_lines import RequestLog
from inflight.metrics.serving import ServingMetrics
from inflight.parsers.reasoning_effort import writes_efforts
from inflight.parsers.selector import NONE, choose_reasoning_parser, resolve_parsers

_TRACE_HEADERS = ("traceparent", "tracestate")


class ApiServer:
    """Immutable, except that `ignored_fields` and `tool_support` remember what they have logged, and for `beside`.

    Attributes:
        model_names: all names of the one model. The answer to a request without a model name has the first of these names.
        request_log: writes a line when a request begins or ends; None if requests are not logged.
        writes_efforts: whether `reasoning_effort` changes what the chat template writes.
        parsers: the parsers of tool calls and reasoning that the settings or the chat template choose.
        tool_support: whether the model can use tools.
        ignored_fields: removes and reports unknown fields.
        beside: tasks that go on after the answer to their request. The server ends only when they have ended.
        fingerprint: a text for clients. It changes when the version, the model or the dtype changes, because then the answers
            to the same requests may change, too.
    """

    def __init__(
        self, engine: AsyncLLM, settings: ServerSettings, metrics: ServingMetrics, request_log: RequestLog | None = None
    ) -> None:
        self.engine = engine
        self.metrics = metrics
        self.request_log = request_log
        self.settings = settings
        self.model_names = settings.served_model_names or (engine.model.name,)
        self.created = int(time.time())
        self.beside: set[asyncio.Task[None]] = set()
        model = engine.model
        known = f"{inflight.__version__} {model.name} {model.dtype}"
        self.fingerprint = "fp_" + hashlib.sha256(known.encode("utf-8")).hexdigest()[:12]
        self.ignored_fields = IgnoredFields(is_strict=settings.strict_fields)
        reasoning_parser = choose_reasoning_parser(settings.reasoning_parser, engine.reasoning, engine.chat_template)
        self.parsers = resolve_parsers(settings.tool_call_parser, reasoning_parser, engine.chat_template)
        self.writes_efforts = writes_efforts(engine.chat_template, settings.default_chat_template_kwargs)
        self.tool_support = ToolSupport(
            model.name, engine.chat_template, self.parsers, is_wanted=settings.tool_call_parser != NONE
        )

    def check_model(self, name: str | None) -> str:
        """Returns the model name for the answer. `name` is the model name in the request, or None.

        Raises:
            ApiError: there is no such model. The status is 404.
        """
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            raise ApiError(
                404,
                f"The model `{name}` does not exist. This server has: {', '.join(self.model_names)}.",
                param="model",
                code="model_not_found",
            )
        return name

    def new_images(self) -> RequestImages:
        """Gets the images of one request."""
        return RequestImages(are_read=self.engine.model.takes_images)

    def log_started(self, request: Request, streams: Sequence[OutputStream]) -> None:
        if self.request_log is not None:
            for each in (stream.request for stream in streams):
                self.request_log.request_started(
                    request.url.path, each.request_id, len(each.prompt_token_ids), each.params
                )


def answer_id(request: Request, prefix: str, wanted: str | None) -> str:
    """The id of an answer, which contains the request's id. That is the id in the header X-Request-Id, else `wanted`, which is
    the body's field `request_id`, else a random id."""
    state = request.scope.setdefault("state", {})
    if wanted is not None and not state.get("has_own_id"):
        state["request_id"] = wanted
    return f"{prefix}-{state.get('request_id') or uuid.uuid4().hex}"


def arrival_time(request: Request) -> float:
    """The `time.monotonic()` at which the middleware `AccessLog` received the request's head, or the current time if the app
    runs without this middleware."""
    return float(request.scope.get("state", {}).get("arrival_time", time.monotonic()))


@asynccontextmanager
async def within_deadline(request: Request) -> AsyncIterator[None]:
    """Limits the time for the work before a request's first token: reading its body, rendering, tokenising.

    Raises:
        RequestTimeoutError: the app's `request_timeout` has passed since `arrival_time`.
    """
    timeout: float | None = request.app.state.request_timeout
    try:
        async with asyncio.timeout(
            None if timeout is None else arrival_time(request) + timeout - time.monotonic()
        ) as scope:
            yield
    except TimeoutError:
        if not scope.expired():
            raise
        raise RequestTimeoutError(f"the request did not begin to run within its deadline of {timeout:g} s") from None


def wanted_replica(request: Request) -> int | None:
    """The replica that the header X-Data-Parallel-Rank names, as in vLLM; None if there is no such header.

    Raises:
        InvalidRequestError: the header is not a number of at most nine digits.
    """
    texts = request.headers.getlist("x-data-parallel-rank")
    if not texts:
        return None
    text = ", ".join(texts)
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InvalidRequestError(
            f"X-Data-Parallel-Rank: {text!r} is not the number of a replica: give 0, 1, ..., or leave the header out"
        )
    return int(text)


def trace_headers(request: Request) -> dict[str, str]:
    """The headers of W3C's trace context, which the engine passes on."""
    return {name: request.headers[name] for name in _TRACE_HEADERS if name in request.headers}
