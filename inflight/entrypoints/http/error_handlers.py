"""Answers with an error: the app's handlers of exceptions, of wrong bodies, and of paths that do not exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from inflight.entrypoints.apis import error_form, methods_of
from inflight.entrypoints.fields.messages import INSTEAD_OF_TYPES
from inflight.entrypoints.http.errors import ApiError, to_api_error
from inflight.entrypoints.http.unserved import unserved
from inflight.errors import InflightError

_MAX_VALIDATION_ERRORS = 3
_WORDS = {  # type of pydantic's error -> our message, if pydantic's message is about Python or does not help the client
    "model_attributes_type": "input should be a JSON object",
    "model_type": "input should be a JSON object",
    "dict_type": "input should be a JSON object",
    "none_required": "this is not served: leave it out, or give null",
    "union_tag_invalid": "the type {tag!r} is none of {expected_tags}",
    "union_tag_not_found": 'the field "type" is required',
}
_MAX_COMPARED = 100  # pydantic's errors that are read for one answer; each of them is compared with all others


def add_error_handlers(app: FastAPI) -> None:
    async def on_error(request: Request, error: Exception) -> Response:
        return to_api_error(error).response(error_form(request.scope))

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return validation_error(error.errors(), error.body).response(error_form(request.scope))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if not isinstance(error, ApiError) and error.status_code in (404, 405):
            return unserved(request.scope, methods_of(request.scope["path"]) if error.status_code == 405 else ())
        told = error if isinstance(error, ApiError) else _http_error(error)
        return told.response(error_form(request.scope))

    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(InflightError, on_error)
    app.add_exception_handler(Exception, on_error)


def _http_error(error: HTTPException) -> ApiError:
    return ApiError(error.status_code, HTTPStatus(error.status_code).phrase.lower(), headers=error.headers)


def validation_error(errors: Sequence[Any], body: object) -> ApiError:  # Any: pydantic's error dicts
    """Make one answer from all of pydantic's errors. `param` is the first field that is wrong."""
    told: dict[str, dict[str, None]] = {}
    compared = errors[:_MAX_COMPARED]
    # If a field may have several types, pydantic reports errors for each type. If a list is too long, the client meant this
    # type, so errors about other types would only confuse.
    too_long = [error for error in compared if error["type"] == "too_long"]
    for error in too_long or compared:
        told.setdefault(_where(error, body), {})[_what(error)] = None
    # Of the errors about several types, report those deepest in the value: they are about the type that fits best. If several
    # types fail at the same place, report all of them.
    furthest = [where for where in told if not any(other.startswith((f"{where}.", f"{where}[")) for other in told)]
    furthest = _without_wrong_type(_of_best_list(furthest, compared, body))
    whats = {where: " or ".join(told[where]) for where in furthest[:_MAX_VALIDATION_ERRORS]}
    messages = [f"{where}: {what}" if where else what for where, what in whats.items()]
    return ApiError(400, "; ".join(messages), param=furthest[0] or None)


def _what(error: Mapping[str, Any]) -> str:
    if error["type"] == "missing":
        if len(error["loc"]) > 1:
            return "this field is required"
        return "the body is missing; send a JSON object"
    if error["type"] in _WORDS:
        return _WORDS[error["type"]].format(**error.get("ctx", {}))
    if error["type"] == "literal_error" and error["loc"][-1] == "type" and isinstance(error["input"], str):
        text = INSTEAD_OF_TYPES.get(error["input"], "")
        if text:
            return text
    text = str(error["msg"]).replace(" after validation", "")
    return text[:1].lower() + text[1:]


def _of_best_list(places: Sequence[str], errors: Sequence[Any], body: object) -> list[str]:  # Any: as above
    """If a field may be a list of one type or of another, and an entry is wrong for each of them, the client meant the list
    that is right up to the latest entry. The `places` of other lists are dropped."""
    of_field: dict[str, dict[str, list[int]]] = {}  # field -> type of the list -> the latest wrong place
    types: dict[str, set[tuple[str, str]]] = {}  # place -> its fields and types
    for error in errors:
        loc = error["loc"]
        cut = next((i for i, part in enumerate(loc) if isinstance(part, str) and "[" in part), None)
        place = _where(error, body)
        if cut is None or place not in places:
            continue
        field, kind = _where({**error, "loc": loc[:cut]}, body), loc[cut]
        numbers = [part for part in loc[cut:] if isinstance(part, int)]
        latest = of_field.setdefault(field, {})
        latest[kind] = max(latest.get(kind, numbers), numbers)
        types.setdefault(place, set()).add((field, kind))
    best = {field: max(latest.values()) for field, latest in of_field.items()}

    def is_best(place: str) -> bool:
        return place not in types or any(of_field[field][kind] == best[field] for field, kind in types[place])

    return [place for place in places if is_best(place)]


def _without_wrong_type(places: Sequence[str]) -> list[str]:
    """If the "type" of an object is wrong, drop the object's other errors, because they are about another type's fields."""
    wrong = [place.removesuffix("type") for place in places if place.endswith(".type")]
    return [place for place in places if place.endswith(".type") or not place.startswith(tuple(wrong))]


def _where(error: Mapping[str, Any], body: object) -> str:
    """The path of an error, such as "messages[0].role" for ("body", "messages", 0, "role"). If a field may have several types,
    pydantic's path also contains the name of a type, which is left out here. A part of the path is the name of a type if the
    object at this place has no such key."""
    loc: Sequence[str | int] = error["loc"]
    path = ""
    value = body
    for i, part in enumerate(loc[1:] if loc and loc[0] in ("body", "path", "query") else loc, 1):
        if isinstance(part, int):
            path += f"[{part}]"
            value = value[part] if isinstance(value, list) and part < len(value) else None
        elif (isinstance(value, Mapping) and part in value) or (error["type"] == "missing" and i == len(loc) - 1):
            path += f".{part}" if path else part
            value = value.get(part) if isinstance(value, Mapping) else None
        elif loc[0] != "body":
            path = str(part)
    return path
