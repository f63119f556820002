"""What clients do with stored responses: read, list the input, delete, cancel, and follow a stream again.

These need no model, so a router answers them itself. All raise `ApiError` if there is no such response, the query is wrong, or
the file cannot be used.
"""

import asyncio
from collections.abc import Mapping
from functools import partial

from starlette.responses import Response
from starlette.types import Send

from inflight.entrypoints.http.errors import ApiError
from inflight.entrypoints.http.sse import DONE, EventStream, WorkResponse
from inflight.entrypoints.json_lines import to_json
from inflight.entrypoints.response_store.responses import StoredResponses, StoreFailedError
from inflight.entrypoints.response_store.store import Found, Item, ResponseStore
from inflight.interface.image_prompts import OWNER

MAX_LISTED, LISTED = 100, 20  # items of one answer: at most, and by default
LOOK_SECONDS = 0.05  # between two looks for new events of a stream
_MAX_DIGITS = 9

Query = Mapping[str, str]


async def read(responses: StoredResponses, id: str, query: Query, keep_alive: float | None = None) -> Response:
    """GET /v1/responses/{id}, also with `stream=true` and `starting_after`. `keep_alive`: see `EventStream`."""
    found = await find(responses, id)
    if not _flag(query, "stream"):
        if "starting_after" in query:
            raise ApiError(400, "starting_after needs stream=true", param="starting_after")
        return _json(found.body)
    after = _number(query, "starting_after", 0, 10**_MAX_DIGITS)
    if not found.has_events:
        message = "only a response that was created with background: true and stream: true can be streamed again"
        raise ApiError(400, message, param="stream")
    return follow(responses, found, first=0 if after is None else after + 1, keep_alive=keep_alive)


def follow(
    responses: StoredResponses,
    found: Found,
    *,
    first: int,
    keep_alive: float | None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """A stream of the events of a response from the number `first` on, until the response has ended. If the client leaves, the
    response goes on. If the file cannot be read any more, the last event is an error: the client can ask again later."""
    owner = OWNER.get()

    def news(store: ResponseStore, number: int) -> tuple[Found | None, list[tuple[int, bytes]]]:
        now = store.find(owner, found.id)  # before the events: if it has ended by then, they are complete
        if now is None or now.number != found.number:
            return None, []
        return now, store.events(found.number, number)

    async def work(send: Send) -> None:
        stream = EventStream(send, keep_alive, headers)
        number = first
        try:
            async with stream.kept_alive():
                while True:
                    now, events = await responses.call(partial(news, number=number)) or (None, [])
                    if events:
                        number = events[-1][0] + 1
                        await stream.send(b"".join(event for _, event in events))
                    elif now is None or now.has_ended:
                        break
                    else:
                        await asyncio.sleep(LOOK_SECONDS)
            count = await responses.call(lambda store: store.num_events(found.number)) or 0
        except StoreFailedError as error:
            if not stream.has_started:
                raise
            last = _error_event(error, number)
        else:
            last = b"" if now is None or first > count else _last_event(now, count)
        await stream.finish(last + DONE)

    return WorkResponse(work)


def _error_event(error: StoreFailedError, next_number: int) -> bytes:
    """Its number is that of the event before it, so that a client that continues behind it misses none."""
    members = {"type": "error", "code": error.code, "message": error.detail, "param": None}
    return b"event: error\ndata: %s\n\n" % to_json({**members, "sequence_number": max(next_number - 1, 0)})


def _last_event(ended: Found, number: int) -> bytes:
    """`response.completed`, or how else it has ended."""
    name = f"response.{ended.status}".encode()
    return b'event: %s\ndata: {"type":"%s","sequence_number":%d,"response":%s}\n\n' % (name, name, number, ended.body)


async def list_input(responses: StoredResponses, id: str, query: Query) -> Response:
    """GET /v1/responses/{id}/input_items: all that the model has read, also of the responses before it."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order={order[:20]!r} is not one of asc, desc", param="order")
    limit = _number(query, "limit", 1, MAX_LISTED) or LISTED
    owner = OWNER.get()
    await find(responses, id)
    conversation = await responses.call(lambda store: store.conversation(owner, id, with_output=False))
    if conversation is None or conversation.last is None:  # it was removed just now
        raise _not_found(id)
    items = conversation.items
    if order == "desc":
        items.reverse()
    if (after := query.get("after")) is not None:
        place = next((i for i, item in enumerate(items) if item.id == after), None)
        if place is None:
            raise ApiError(404, f"after={after[:100]!r}: the input has no item with this id", param="after")
        items = items[place + 1 :]
    shown = items[:limit]
    return _json(_listed(shown, has_more=len(items) > limit))


def _listed(items: list[Item], *, has_more: bool) -> bytes:
    ends = {"first_id": items[0].id if items else None, "last_id": items[-1].id if items else None}
    data = b",".join(item.body for item in items)
    return b'{"object":"list","data":[%s],%s' % (data, to_json({**ends, "has_more": has_more})[1:])


async def delete(responses: StoredResponses, id: str) -> Response:
    """DELETE /v1/responses/{id}. If it is computed now, it is ended."""
    owner = OWNER.get()
    if not await responses.call(lambda store: store.remove(owner, id)):
        raise _not_found(id)
    return _json(to_json({"id": id, "object": "response", "deleted": True}))


async def cancel(responses: StoredResponses, id: str) -> Response:
    """POST /v1/responses/{id}/cancel. Of a response that has ended, it is the answer as it is."""
    owner = OWNER.get()
    if not (await find(responses, id)).is_background:
        message = (
            "only a response that was created with background: true can be cancelled; end the request of another one"
        )
        raise ApiError(400, message, param="response_id")
    found = await responses.call(lambda store: store.cancel(owner, id))
    if found is None:
        raise _not_found(id)
    return _json(found.body)


async def find(responses: StoredResponses, id: str) -> Found:
    """
    Raises:
        ApiError: this client has no such response.
    """
    owner = OWNER.get()
    found = await responses.call(lambda store: store.find(owner, id))
    if found is None:
        raise _not_found(id) if responses.is_on else _not_stored(id)
    return found


def _not_found(id: str) -> ApiError:
    return ApiError(404, f"Response with id {id!r} not found.", code="response_not_found")


def _not_stored(id: str) -> ApiError:
    message = f"Response with id {id!r} not found: this server stores no responses (--response-store none)."
    return ApiError(404, message, code="response_not_found")


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _flag(query: Query, name: str) -> bool:
    given = query.get(name, "false")
    if given not in ("true", "false"):
        raise ApiError(400, f"{name}={given[:20]!r} is not one of true, false", param=name)
    return given == "true"


def _number(query: Query, name: str, low: int, high: int) -> int | None:
    given = query.get(name)
    if given is None:
        return None
    is_number = given.isascii() and given.isdigit() and len(given) <= _MAX_DIGITS
    if not is_number or not low <= int(given) <= high:
        raise ApiError(400, f"{name}={given[:20]!r} is not a whole number from {low} to {high}", param=name)
    return int(given)
