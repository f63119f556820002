"""`RouterApp`: the app of a server with several models. It finds the model of a request, has it loaded, and forwards to it.

The router itself answers what concerns all models: /v1/models, /models/load and /models/unload (llama.cpp's), /api/tags, ps,
show, pull and delete (Ollama's), stored responses, /metrics, /health and /version, and it refuses what no endpoint answers. All
other requests go to the process of the model that the body or the query names, as in `GET /tokenizer_info?model=NAME`. Without
a name, a request without a body goes to the loaded model that was used last; otherwise it goes to the only model, and if there
are several, it is refused.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs

import msgspec

import inflight
from inflight.entrypoints.apis import api_at, methods_of
from inflight.entrypoints.http.errors import ApiError
from inflight.entrypoints.http.unserved import unserved
from inflight.entrypoints.response_store.responses import StoredResponses
from inflight.entrypoints.router.catalog import Catalog, FolderGoneError, KnownModel, NameOutsideError
from inflight.entrypoints.router.descriptions import Descriptions
from inflight.entrypoints.router.forward import forward
from inflight.entrypoints.router.keep_alive import read_keep_alive
from inflight.entrypoints.router.loaded_models import LoadedModels, ModelState, ShuttingDownError, Slot
from inflight.entrypoints.router.management import Downloads, ManagementError, check_deletable, delete, pull
from inflight.entrypoints.router.responses import RoutedResponses
from inflight.entrypoints.serve.asgi import (
    OTHER_SITE,
    OTHER_SITE_CODE,
    Receive,
    Scope,
    Send,
    header_of,
    is_of_other_site,
    send_body,
    send_error,
    send_json,
)
from inflight.errors import ConfigError, InflightError, ModelNotFoundError, OutOfMemoryError

_LARGE_BODY_BYTES = 2**18  # a larger body is parsed in a thread
_ASK_BEGIN, _MODELS = "/v1/models/", "/v1/models"
_FEED = "/v1/engine/live"
_ASKS_MODEL = frozenset({"/api/chat", "/api/generate"})

# Error -> status and code of the answer; the first that fits
_STATUS: dict[type[InflightError], tuple[int, str]] = {
    NameOutsideError: (400, "invalid_model_name"),
    FolderGoneError: (500, "models_unreadable"),
    ModelNotFoundError: (404, "model_not_found"),
    OutOfMemoryError: (507, "insufficient_memory"),
    ShuttingDownError: (503, "server_draining"),
    InflightError: (500, "model_load_failed"),
}

Answer = Callable[[Scope, Receive, Send], Awaitable[None]]


class NamedModel(msgspec.Struct):
    """The fields of a body that the router reads. The model's own server reads all of them."""

    model: Any = None
    name: Any = None
    keep_alive: Any = None
    stream: Any = None
    prompt: Any = None
    messages: Any = None
    input: Any = None
    previous_response_id: Any = None
    background: Any = None

    @property
    def asks_nothing(self) -> bool:
        return not self.prompt and not self.messages and not self.input


class RequestError(Exception):
    """A request that the router refuses."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class RouterApp:
    """Used by one event loop.

    Args:
        may_manage: whether requests may pull and delete models.
        allowed_origins: the sites whose pages may send any request.
    """

    def __init__(
        self,
        catalog: Catalog,
        models: LoadedModels,
        responses: StoredResponses,
        *,
        may_manage: bool,
        allowed_origins: Collection[str] = (),
    ) -> None:
        self._catalog = catalog
        self._models = models
        self._responses = RoutedResponses(responses, models)
        self._descriptions = Descriptions(models)
        self._may_manage = may_manage
        self._downloads = Downloads()
        self._allowed_origins = allowed_origins
        self._own: dict[tuple[str, str], Answer] = {
            ("GET", "/"): self._root,
            ("GET", "/health"): self._status("healthy"),
            ("GET", "/ping"): self._status("healthy"),
            ("POST", "/ping"): self._status("healthy"),
            ("GET", "/ready"): self._status("ready"),
            ("GET", "/version"): self._version,
            ("GET", "/metrics"): self._metrics,
            ("GET", _MODELS): self._list,
            ("POST", "/v1/models/load"): self._load,
            ("POST", "/v1/models/unload"): self._unload,
            ("GET", "/api/version"): self._ollama_version,
            ("GET", "/api/tags"): self._tags,
            ("GET", "/api/ps"): self._running,
            ("POST", "/api/show"): self._show,
            ("POST", "/api/pull"): self._pull,
            ("DELETE", "/api/delete"): self._delete,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        answer = self._own.get((method, path), self._forward)
        if method == "GET" and path.startswith(_ASK_BEGIN):
            answer = self._one
        elif (stored := self._responses.answer_to(method, path)) is not None:
            answer = stored
        try:
            if method != "GET" and self._is_unasked(scope):
                raise RequestError(403, OTHER_SITE, OTHER_SITE_CODE)
            await answer(scope, receive, send)
        except RequestError as error:
            await _refuse(scope, send, error.status, str(error), error.code)
        except ApiError as error:
            await send_body(send, error.status_code, error.body(), b"application/json")
        except ManagementError as error:
            await _refuse(scope, send, error.status, str(error), "model_management")
        except InflightError as error:
            kind = next(each for each in _STATUS if isinstance(error, each))
            status, code = _STATUS[kind]
            await _refuse(scope, send, status, str(error), code)

    def _is_unasked(self, scope: Scope) -> bool:
        """Whether a page of another site has sent the request, and the browser did not have to ask the server before."""
        sent = (header_of(scope, b"content-type") or b"").partition(b";")[0].strip().lower()
        return sent != b"application/json" and is_of_other_site(scope, self._allowed_origins)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        methods = {*methods_of(path), *(method for method, own_path in self._own if own_path == path)}
        if scope["method"] not in methods:
            await unserved(scope, methods)(scope, receive, send)
            return
        body = await _read_body(receive)
        named = await _named(body) if body else NamedModel()
        asked = named.model or named.name or _query(scope, "model")
        if not asked and isinstance(named.previous_response_id, str):
            asked = await self._responses.model_of(named.previous_response_id)
        known = await self._find(asked, body)
        keep_alive = _keep_alive(named) if path.startswith("/api/") else None
        slot = self._models.slot(known)
        if slot.state is not ModelState.LOADED and self._is_unasked(scope):
            raise RequestError(403, OTHER_SITE, OTHER_SITE_CODE)
        if keep_alive == 0 and named.asks_nothing and path in _ASKS_MODEL:
            await self._unload_by_keep_alive(scope, send, slot)
            return
        if path == _FEED:
            await self._watch(slot, scope, receive, send)
            return
        async with self._models.use(known, keep_alive) as slot:
            try:
                await forward(slot.socket, scope, body, receive, send)
            finally:
                if named.background is True:
                    self._responses.watch(known)

    async def _watch(self, slot: Slot, scope: Scope, receive: Receive, send: Send) -> None:
        """The feed of an engine. Whoever watches it neither has a model loaded nor keeps it from being unloaded: the feed ends
        then."""
        if slot.state is not ModelState.LOADED:
            raise RequestError(409, f"model {slot.known.name!r} is {slot.state}, not loaded", "model_not_loaded")
        await forward(slot.socket, scope, b"", receive, send)

    async def _find(self, asked: object, body: bytes) -> KnownModel:
        if asked is not None and not isinstance(asked, str):
            raise RequestError(400, f"model must be a string, not {type(asked).__name__}", "invalid_type")
        if asked:
            return await asyncio.to_thread(self._catalog.find, asked)
        newest = self._models.newest()
        if newest is not None and not body:
            return newest.known
        known = await asyncio.to_thread(self._catalog.models)
        if len(known) == 1:
            return next(iter(known.values()))
        raise RequestError(400, "the request names no model: give `model`; /v1/models lists them", "model_missing")

    async def _slot_of(self, receive: Receive) -> Slot:
        named = await _named(await _read_body(receive))
        return self._models.slot(await self._find(named.model or named.name, b"-"))

    async def _load(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Begin to load. As in llama.cpp the answer comes at once, and /v1/models shows when it is done."""
        slot = await self._slot_of(receive)
        self._models.load(slot)
        await send_json(send, 200, {"success": True})

    async def _unload(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Begin to unload: running requests end first."""
        slot = await self._slot_of(receive)
        if slot.state is not ModelState.LOADED:
            raise RequestError(400, f"model {slot.known.name!r} is {slot.state}, not loaded", "model_not_loaded")
        self._models.begin_unloading(slot)
        await send_json(send, 200, {"success": True})

    async def _list(self, scope: Scope, receive: Receive, send: Send) -> None:
        known = await asyncio.to_thread(self._catalog.models)
        cards = [await self._descriptions.card(each) for each in known.values()]
        ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"]} if cards else {}
        await send_json(send, 200, {"object": "list", "data": cards, "has_more": False, **ends})

    async def _one(self, scope: Scope, receive: Receive, send: Send) -> None:
        known = await asyncio.to_thread(self._catalog.find, scope["path"].removeprefix(_ASK_BEGIN))
        await send_json(send, 200, await self._descriptions.card(known))

    async def _tags(self, scope: Scope, receive: Receive, send: Send) -> None:
        known = await asyncio.to_thread(self._catalog.models)
        await send_json(send, 200, {"models": [await self._descriptions.tag(each) for each in known.values()]})

    async def _running(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 200, {"models": await self._descriptions.running()})

    async def _show(self, scope: Scope, receive: Receive, send: Send) -> None:
        """If the model is loaded, its server answers; otherwise the router does, without loading it."""
        body = await _read_body(receive)
        named = await _named(body)
        known = await self._find(named.model or named.name, body)
        if self._models.slot(known).state is ModelState.LOADED:
            async with self._models.use(known) as slot:
                await forward(slot.socket, scope, body, receive, send)
            return
        await send_json(send, 200, await self._descriptions.shown(known))

    async def _pull(self, scope: Scope, receive: Receive, send: Send) -> None:
        named = await _named(await _read_body(receive))
        asked = named.model or named.name
        known = await asyncio.to_thread(self._catalog.models)
        if not isinstance(asked, str) or not asked:
            raise RequestError(400, "the request names no model: give `model`", "model_missing")
        is_there = asked in known
        if not is_there and not self._may_manage:
            raise RequestError(403, _not_allowed("pulled"), "model_management")
        task = None if is_there else self._downloads.begin(asked)
        await pull(task, asked, send, self._models.wait, streams=named.stream is not False)

    async def _delete(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._may_manage:
            raise RequestError(403, _not_allowed("deleted"), "model_management")
        slot = await self._slot_of(receive)
        check_deletable(slot.known)
        async with self._models.unloaded(slot):
            await delete(slot.known)
        await send_json(send, 200, {})

    async def _metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await self._descriptions.metrics()
        await send_body(send, 200, body, b"text/plain; version=0.0.4; charset=utf-8")

    async def _version(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 200, {"version": inflight.__version__})

    async def _ollama_version(self, scope: Scope, receive: Receive, send: Send) -> None:
        api = api_at(scope["path"])
        await send_json(send, 200, {"version": inflight.__version__ if api is None else api.version})

    async def _root(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_body(send, 200, b"Ollama is running", b"text/plain; charset=utf-8")

    async def _unload_by_keep_alive(self, scope: Scope, send: Send, slot: Slot) -> None:
        """Ollama's clients unload a model by a request with `keep_alive` 0 and without a prompt."""
        if slot.state in (ModelState.LOADING, ModelState.LOADED):
            async with self._models.use(slot.known, 0.0):
                pass
        text: dict[str, object] = {"response": ""}
        if scope["path"] == "/api/chat":
            text = {"message": {"role": "assistant", "content": ""}}
        now = datetime.now(UTC).isoformat()
        body = {"model": slot.known.name, "created_at": now, **text, "done": True, "done_reason": "unload"}
        await send_json(send, 200, body)

    def _status(self, status: str) -> Answer:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await send_json(send, 200, {"status": status})

        return answer


def _not_allowed(what: str) -> str:
    return f"models are not {what} over HTTP: start the server with --enable-model-management, or use `inflight`"


async def _refuse(scope: Scope, send: Send, status: int, message: str, code: str) -> None:
    kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    await send_error(scope, send, status, message, kind=kind, code=code)


async def _read_body(receive: Receive) -> bytes:
    pieces = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestError(499, "the client has gone", "client_gone")
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(pieces)


async def _named(body: bytes) -> NamedModel:
    try:
        if len(body) > _LARGE_BODY_BYTES:
            return await asyncio.to_thread(msgspec.json.decode, body, type=NamedModel)
        return msgspec.json.decode(body, type=NamedModel)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        message = "the body is not a JSON object, so it does not say which model is meant"
        raise RequestError(400, message, "invalid_json") from None


def _query(scope: Scope, name: str) -> str | None:
    values = parse_qs(scope.get("query_string", b"").decode("latin-1")).get(name)
    return values[0] if values else None


def _keep_alive(named: NamedModel) -> float | None:
    """
    Raises:
        RequestError: `keep_alive` cannot be read.
    """
    if named.keep_alive is None:
        return None
    try:
        return read_keep_alive(named.keep_alive)
    except ConfigError as error:
        raise RequestError(400, str(error), "invalid_value") from None
