"""`JsonRoute`: reads bodies as strict JSON. It refuses NaN, repeated keys, deep nesting and all encodings but UTF-8.

A lone surrogate, which is half of a character, becomes U+FFFD. A client that cuts texts in UTF-16 leaves one in the history, so
all later requests of the conversation contain it. In the fields of `_EXACT` it is refused, because another character would
have another meaning there: the answer would be held to a text that the client did not give.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, cast

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.types import Scope

from inflight.entrypoints.apis import api_at
from inflight.entrypoints.fields.constraint_fields import Constraints
from inflight.entrypoints.fields.thinking_fields import ThinkingFields
from inflight.entrypoints.http.errors import ApiError
from inflight.entrypoints.http.long_strings import put_back, take_long_strings
from inflight.entrypoints.http.server import within_deadline
from inflight.entrypoints.serve.asgi import OTHER_SITE, OTHER_SITE_CODE, is_of_other_site
from inflight.parsers.surrogates import without_lone_surrogates

_PARSED_AT_ONCE = 64 * 1024  # bytes; a larger body is parsed in a thread, so that other requests need not wait
# The GIL is held while a body is parsed and while pydantic checks it. The next two limits bound this time.
MAX_VALUES = 2**18  # per body
MAX_KEYS = 4096  # per object
_SLICE = 2**18  # bytes that one call of `count` searches
# Fields whose text must be exact, at any depth: what constrains or ends the answer, the tools, and what separates the prefix
# caches of users. Only descriptions in them may be damaged.
_EXACT = Constraints.model_fields.keys() - ThinkingFields.model_fields.keys()
_EXACT |= {"options", "tools", "functions", "cache_salt"}
_DESCRIPTIONS = frozenset("description title $comment examples example default".split())
# A JSON string. A string without an end is matched up to the end of the body, so that the search takes linear time.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)


class JsonRoute(APIRoute):
    """Used by an app whose `state` has `request_timeout`, because `within_deadline` reads it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        has_body = self.body_field is not None

        async def handle_strictly(request: Request) -> Response:
            if not has_body:
                _check_origin(request)
                return await handle(request)
            scope = request.scope
            api = api_at(scope["path"])
            if api is not None and api.takes_any_content_type and "origin" not in request.headers:
                scope = _as_json(scope)
            _check_content_type(Request(scope))
            # Here the deadline limits receiving, parsing and checking the body. Later the response checks the deadline again.
            async with within_deadline(request):
                return await handle(_StrictRequest(scope, request.receive))

        return handle_strictly


class _StrictRequest(Request):
    async def body(self) -> bytes:
        """The body as it grows in one buffer. To join its chunks in the end would stop the event loop for milliseconds."""
        if not hasattr(self, "_body"):
            body = bytearray()
            async for chunk in self.stream():
                body += chunk
            self._body = cast("bytes", body)
        return self._body

    async def json(self) -> Any:  # Any: JSON
        body = await self.body()
        if len(body) <= _PARSED_AT_ONCE:
            return parse_json(body)
        return await asyncio.to_thread(parse_json, body)


def _as_json(scope: Scope) -> Scope:
    """Returns the scope with the type application/json. The clients of some APIs send JSON with any type, or with none. With
    some types a web page of another site could send it, too, without a preflight. So this is only for requests without
    `Origin`, which no page of another site has sent."""
    others = [header for header in scope["headers"] if header[0] != b"content-type"]
    return {**scope, "headers": [*others, (b"content-type", b"application/json")]}


def _check_origin(request: Request) -> None:
    """Refuse a request without a body that a page of another site has sent, if it may change something.

    Raises:
        ApiError: a page of another site has sent the request, and `allowed_origins` does not have that site.
    """
    is_reading = request.method in ("GET", "HEAD")
    if not is_reading and is_of_other_site(request.scope, request.app.state.allowed_origins):
        raise ApiError(403, OTHER_SITE, code=OTHER_SITE_CODE)


def _check_content_type(request: Request) -> None:
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != "application/json":
        raise ApiError(
            415, "the body must be JSON: set Content-Type to application/json", code="unsupported_media_type"
        )
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(
            415,
            f"a body with Content-Encoding: {encoding} cannot be read: send it without compression",
            code="unsupported_media_type",
            headers={"Accept-Encoding": "identity"},
        )


def parse_json(body: bytes | bytearray) -> Any:
    """Parse strict JSON. A byte-order mark before the JSON is ignored, as RFC 8259, section 8.1 allows.

    Raises:
        ApiError: the body is not strict JSON, or is too large. The status is 400, and the message says why.
    """
    short, strings = take_long_strings(body)
    _check_size(short)
    if strings:
        with suppress(ValueError, RecursionError):  # the error is that of the whole
            value = _parse_bytes(short, strings)
            if not strings:
                return value
    try:
        return _parse_bytes(body, {})
    except UnicodeDecodeError as error:
        raise _bad_json(f"byte {error.start} is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise _bad_json(f"{error.msg} at line {error.lineno}, column {error.colno}") from error
    except RecursionError as error:
        raise _bad_json("it is nested too deeply") from error
    except ValueError as error:  # an integer of thousands of digits
        raise _bad_json("a number in it is too long") from error


def _parse_bytes(body: bytes | bytearray, strings: dict[str, str]) -> Any:
    """`strings`: those that were taken out of the body, by their names. Removes each that is put back."""
    text = body.decode("utf-8-sig")
    if "\\ud" in text or "\\uD" in text:
        value = _parse(text, {})
        if _has_lone_surrogate(value):
            _check_exact(value)
            text = without_lone_surrogates(text)
        elif not strings:
            return value
    return _parse(text, strings)


def _parse(text: str, strings: dict[str, str]) -> Any:
    return json.loads(text, object_pairs_hook=partial(_object, strings), parse_constant=_refuse_constant)


def _has_lone_surrogate(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _check_exact(body: object) -> None:
    """
    Raises:
        ApiError: a field of `_EXACT` has a lone surrogate.
    """
    for name, value in body.items() if isinstance(body, dict) else ():
        place = _place_of_lone_surrogate(value, name) if name in _EXACT and _has_lone_surrogate(value) else None
        if place is not None:
            message = f"{place} has a lone surrogate, which is half of a character and in no text: leave it out"
            raise ApiError(400, message, param=place)


def _place_of_lone_surrogate(value: object, path: str) -> str | None:
    """The path of the first text, or of the object with the first key, that has a lone surrogate. None if only descriptions
    have one."""
    if isinstance(value, str):
        return path if _has_lone_surrogate(value) else None
    if isinstance(value, list):
        places = (_place_of_lone_surrogate(item, f"{path}[{i}]") for i, item in enumerate(value))
        return next((place for place in places if place is not None), None)
    for key, item in value.items() if isinstance(value, dict) else ():
        if _has_lone_surrogate(key):
            return path
        is_description = key in _DESCRIPTIONS and isinstance(item, str)
        if not is_description and (place := _place_of_lone_surrogate(item, f"{path}.{key}")) is not None:
            return place
    return None


def _check_size(body: bytes | bytearray) -> None:
    """Refuse a body with too many values. The number of values is estimated by the number of commas and opening brackets
    outside strings."""
    num_values = _count_values(body)
    if num_values > MAX_VALUES:
        num_values -= sum(_count_values(string[0]) for string in _STRING.finditer(body))
    if num_values > MAX_VALUES:
        raise ApiError(400, f"the body has more than {MAX_VALUES} values: send a smaller one")


def _count_values(text: bytes | bytearray) -> int:
    slices = range(0, len(text), _SLICE)
    return sum(text.count(mark, at, at + _SLICE) for at in slices for mark in (b",", b"[", b"{"))


def _object(strings: dict[str, str], pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if strings:
        pairs = [(key, put_back(value, strings)) for key, value in pairs]
    if len(pairs) > MAX_KEYS:
        raise ApiError(400, f"an object in the body has {len(pairs)} keys; at most {MAX_KEYS} are allowed")
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _bad_json(f"one object has the key {repeated!r} twice")
    return made


def _refuse_constant(constant: str) -> float:
    raise _bad_json(f"{constant} is not a JSON number")


def _bad_json(why: str) -> ApiError:
    return ApiError(400, f"the body is not valid JSON: {why}", code="invalid_json")
