"""Stored responses, as a request to /v1/responses sees them: the conversation that it continues, and what is kept of it."""

import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from inflight.entrypoints.fields.field_error import FieldError
from inflight.entrypoints.fields.messages import MAX_MESSAGES
from inflight.entrypoints.http.errors import ApiError
from inflight.entrypoints.json_lines import to_json
from inflight.entrypoints.response_store.responses import StoredResponses, StoreFailedError
from inflight.entrypoints.response_store.store import Item, NewResponse, NoRoomError, ResponseStore, TooLargeError
from inflight.entrypoints.responses_api.items import REASONING_ID, InputItem, ItemReference, MessageItem
from inflight.entrypoints.responses_api.protocol import ResponsesRequest
from inflight.interface.image_prompts import OWNER

logger = logging.getLogger(__name__)

_ITEMS: TypeAdapter[list[Any]] = TypeAdapter(list[InputItem])  # Any: the models of items
_ID_PREFIXES: Mapping[str, str] = {
    "message": "msg_",
    "reasoning": REASONING_ID,
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
}
_HAVE_STATUS = ("message", "function_call", "function_call_output", "reasoning")


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The response is stored when it is complete, and one in the background also before that.

    Attributes:
        owner: see `ResponseStore`.
        input: the request's own items, without those of the conversation that it continues.
    """

    responses: StoredResponses
    owner: str
    previous: str | None
    input: str | Sequence[Any]
    is_background: bool
    has_events: bool

    async def add(self, id: str, model: str, status: str, body: bytes, output: Sequence[bytes]) -> bool | None:
        """Returns None if it cannot be stored, and False if a response with this id is computed now.

        Raises:
            ApiError: it is to run in the background, and there is no room for it.
        """

        def work(store: ResponseStore) -> bool | NoRoomError:
            new = NewResponse(
                owner=self.owner,
                id=id,
                previous=self.previous,
                model=model,
                status=status,
                body=body,
                input=stored_input(self.input),
                output=stored_output(output),
                is_background=self.is_background,
                has_events=self.has_events,
            )
            try:
                return store.add(new)
            except NoRoomError as error:  # the file is as good as before
                return error

        try:
            found = await self.responses.call(work)
        except StoreFailedError:
            return None
        if not isinstance(found, NoRoomError):
            return found
        if self.is_background:
            message = f"a response in the background must be stored, and this one cannot be: {found}"
            if isinstance(found, TooLargeError):
                raise ApiError(400, f"{message}. Send a smaller request", code="response_too_large")
            raise ApiError(503, f"{message}. Try again later", type="server_error", code="response_store_full")
        logger.warning("the response %s is not stored: %s", id, found)
        return None


@dataclass(frozen=True, kw_only=True)
class WholeInput:
    """Attributes: `earlier`: the items of the conversation that a request continues. `own`: those of the request, in which
    references are replaced by what they refer to."""

    earlier: Sequence[Any]
    own: str | Sequence[Any]

    @property
    def items(self) -> list[Any]:
        return [*self.earlier, *_items_of(self.own)]


def kept_of(body: ResponsesRequest, responses: StoredResponses, whole: WholeInput) -> Kept | None:
    """
    Raises:
        FieldError: the request wants to run in the background, and is not stored.
    """
    is_stored = responses.is_on and body.store is not False
    if body.background and not is_stored:
        why = "store is false" if responses.is_on else "this server stores none (--response-store none)"
        raise FieldError("background", f"background=true needs a stored response, and {why}: leave one of them out")
    if not is_stored:
        return None
    return Kept(
        responses=responses,
        owner=OWNER.get(),
        previous=body.previous_response_id,
        input=whole.own,
        is_background=bool(body.background),
        has_events=bool(body.background and body.stream),
    )


async def whole_input(body: ResponsesRequest, responses: StoredResponses) -> WholeInput:
    """
    Raises:
        ApiError: the response that the request continues is not there, has not ended, or cannot be read.
        FieldError: the conversation is too long.
    """
    own = body.input if isinstance(body.input, str) else await _without_references(body.input, responses)
    id = body.previous_response_id
    if id is None:
        return WholeInput(earlier=(), own=own)
    earlier = await _conversation(id, responses)
    whole = WholeInput(earlier=earlier, own=own)
    num_items = len(whole.items)
    if num_items >= MAX_MESSAGES:
        message = f"the conversation has {num_items} items; at most {MAX_MESSAGES - 1} are allowed: begin a new one"
        raise FieldError("previous_response_id", message)
    return whole


async def _conversation(id: str, responses: StoredResponses) -> Sequence[Any]:
    owner = OWNER.get()
    found = await responses.call(lambda store: store.conversation(owner, id))
    if found is None or found.last is None:
        why = "" if responses.is_on else ": this server stores no responses. Send the whole conversation as input"
        raise _not_found(f"Previous response with id {id!r} not found{why}.")
    if found.missing:
        raise _not_found(
            f"Previous response with id {id!r} continues {found.missing!r}, which was deleted or is too old. Send the whole "
            "conversation as input."
        )
    if not found.last.has_ended:
        message = f"Previous response with id {id!r} is {found.last.status}: wait until it has ended, or cancel it."
        raise ApiError(400, message, param="previous_response_id", code="previous_response_not_completed")

    def read(_: ResponseStore) -> Sequence[Any] | None:
        try:
            return _ITEMS.validate_json(_list_of(found.items))
        except ValidationError as error:
            logger.error("the stored conversation of %s cannot be read: %s", id, error)
            return None

    items = await responses.call(read)
    if items is None:  # an answer without the conversation would be wrong
        message = f"The conversation of the previous response {id!r} cannot be read: send all of it as input."
        raise ApiError(500, message, type="server_error", param="previous_response_id", code="response_store_failed")
    return items


def _not_found(message: str) -> ApiError:
    return ApiError(404, message, param="previous_response_id", code="previous_response_not_found")


async def _without_references(items: Sequence[Any], responses: StoredResponses) -> Sequence[Any]:
    """The items, in which stored ones stand for references to them. A reference to nothing is left as it is."""
    ids = {item.id for item in items if isinstance(item, ItemReference)}
    if not ids:
        return items
    owner = OWNER.get()

    def work(store: ResponseStore) -> dict[str, Any]:
        stored = [item for id in ids if (item := store.item(owner, id)) is not None]
        read = _ITEMS.validate_json(_list_of(stored))
        return {item.id: value for item, value in zip(stored, read, strict=True)}

    found = await responses.call(work) or {}
    return [found.get(item.id, item) if isinstance(item, ItemReference) else item for item in items]


def stored_input(given: str | Sequence[Any]) -> list[Item]:
    """The items of a request as they are stored, and as clients get them: each has a type and an id, and each content is a
    list of parts."""
    return [_stored(item) for item in _items_of(given)]


def _items_of(given: str | Sequence[Any]) -> Sequence[Any]:
    """The items of a request. A text is a message of the user."""
    return [MessageItem(role="user", content=given)] if isinstance(given, str) else given


def _stored(item: Any) -> Item:
    members = item.model_dump(mode="json", by_alias=True, exclude_unset=True)
    kind = members["type"] = members.get("type") or "message"
    members["id"] = members.get("id") or _ID_PREFIXES.get(kind, "item_") + uuid.uuid4().hex
    if kind in _HAVE_STATUS and members.get("status") is None:
        members["status"] = "completed"
    content = members.get("content")
    if kind == "message" and isinstance(content, str):
        if members["role"] == "assistant":
            members["content"] = [{"type": "output_text", "text": content, "annotations": []}]
        else:
            members["content"] = [{"type": "input_text", "text": content}]
    return Item(id=members["id"], body=to_json(members))


def stored_output(items: Sequence[bytes]) -> list[Item]:
    return [Item(id=from_json(item)["id"], body=item) for item in items]


def _list_of(items: Sequence[Item]) -> bytes:
    return b"[%s]" % b",".join(item.body for item in items)
