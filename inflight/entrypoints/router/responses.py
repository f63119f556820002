"""`RoutedResponses`: what the router itself does with stored responses. No model is loaded for it."""

import asyncio
import re
from collections.abc import Awaitable, Callable

from starlette.datastructures import QueryParams
from starlette.responses import Response

from inflight.entrypoints.http.errors import ApiError
from inflight.entrypoints.response_store import reading
from inflight.entrypoints.response_store.responses import StoredResponses, StoreFailedError
from inflight.entrypoints.router.catalog import KnownModel
from inflight.entrypoints.router.loaded_models import LoadedModels
from inflight.entrypoints.serve.asgi import Receive, Scope, Send
from inflight.interface.image_prompts import OWNER

LOOK_SECONDS = 0.5  # between two looks whether a model has responses in the background
KEEP_ALIVE_SECONDS = 10.0  # see `EventStream`
_PATH = re.compile(r"/v1/responses/([^/]+)(/input_items|/cancel|)")
_IS_OWN = frozenset([("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")])

Answer = Callable[[Scope, Receive, Send], Awaitable[None]]


class RoutedResponses:
    """Used by one event loop."""

    def __init__(self, responses: StoredResponses, models: LoadedModels) -> None:
        self._responses = responses
        self._models = models
        self._watching: dict[str, asyncio.Task[None]] = {}

    def answer_to(self, method: str, path: str) -> Answer | None:
        """None if a model answers this request."""
        found = _PATH.fullmatch(path)
        if found is None or (method, found[2]) not in _IS_OWN:
            return None
        id, end = found.groups()

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            query = QueryParams(scope.get("query_string", b""))
            response = await self._answer(method, id, end, query)
            await response(scope, receive, send)

        return answer

    async def _answer(self, method: str, id: str, end: str, query: reading.Query) -> Response:
        if method == "DELETE":
            return await reading.delete(self._responses, id)
        if end == "/cancel":
            return await reading.cancel(self._responses, id)
        if end == "/input_items":
            return await reading.list_input(self._responses, id, query)
        return await reading.read(self._responses, id, query, KEEP_ALIVE_SECONDS)

    async def model_of(self, id: str) -> str:
        """The model that has written a response of this client, which another request continues.

        Raises:
            ApiError: there is no such response, or the file cannot be read.
        """
        owner = OWNER.get()
        found = await self._responses.call(lambda store: store.find(owner, id))
        if found is None:
            message = f"Previous response with id {id!r} not found."
            raise ApiError(404, message, param="previous_response_id", code="previous_response_not_found")
        return found.model

    def watch(self, known: KnownModel) -> None:
        """Keep a model loaded as long as it has responses in the background, whose clients may have left."""
        if known.name not in self._watching:
            task = self._watching[known.name] = asyncio.create_task(self._watch(known))
            task.add_done_callback(lambda _: self._watching.pop(known.name))

    async def _watch(self, known: KnownModel) -> None:
        while await self._is_computing(known):
            async with self._models.use(known):
                while await self._is_computing(known):
                    await asyncio.sleep(LOOK_SECONDS)

    async def _is_computing(self, known: KnownModel) -> bool:
        try:
            return bool(await self._responses.call(lambda store: store.is_computing(known.names)))
        except StoreFailedError:  # nobody can read its responses, so the model may be unloaded
            return False
