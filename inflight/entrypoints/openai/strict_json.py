"""`JsonRoute`: bodies are JSON in UTF-8, without NaN, repeated keys or endless nesting; else it is a 400 or 415."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from inflight.entrypoints.openai.errors import ApiError

_PARSED_AT_ONCE = 64 * 1024  # bytes; a larger body is parsed by a thread, so that streams go on beside it


class JsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        has_body = self.body_field is not None

        async def handle_strictly(request: Request) -> Response:
            if has_body:
                _check_content_type(request)
                request = _StrictRequest(request.scope, request.receive)
            return await handle(request)

        return handle_strictly


class _StrictRequest(Request):
    async def json(self) -> Any:  # Any: JSON
        body = await self.body()
        return parse_json(body) if len(body) <= _PARSED_AT_ONCE else await asyncio.to_thread(parse_json, body)


def _check_content_type(request: Request) -> None:
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != "application/json":
        raise ApiError(
            415, "the body must be JSON: set Content-Type to application/json", code="unsupported_media_type"
        )


def parse_json(body: bytes) -> Any:
    """Strict JSON.

    Raises:
        ApiError: 400, with what is wrong.
    """
    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=_object, parse_constant=_refuse_constant)
        if b"\\ud" in body or b"\\uD" in body:  # half of a pair is no text: nothing behind this could encode it
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except UnicodeEncodeError as error:
        raise _bad_json("it holds a lone surrogate") from error
    except UnicodeDecodeError as error:
        raise _bad_json(f"byte {error.start} is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise _bad_json(f"{error.msg} at line {error.lineno}, column {error.colno}") from error
    except RecursionError as error:
        raise _bad_json("it is nested too deep") from error
    except ValueError as error:  # an integer of thousands of digits
        raise _bad_json("a number in it is too long") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _bad_json(f"the key {repeated!r} stands twice in one object")
    return made


def _refuse_constant(constant: str) -> float:
    raise _bad_json(f"{constant} is no JSON number")


def _bad_json(why: str) -> ApiError:
    return ApiError(400, f"the body is not valid JSON: {why}", code="invalid_json")
