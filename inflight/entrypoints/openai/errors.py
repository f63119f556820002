"""Errors as OpenAI writes them, {"error": {"message", "type", "param", "code"}}: one table from exception to answer.

A body says what the client did wrong, or that the server failed; it never carries a path, a traceback or an address.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from inflight.errors import (
    ContextLengthExceededError,
    EngineClosedError,
    EngineDeadError,
    InflightError,
    InvalidRequestError,
    OverloadedError,
    RequestTimeoutError,
    TokenizerError,
)

logger = logging.getLogger(__name__)

MAX_MESSAGE = 1000  # characters; a message may quote what the client sent
_KEPT_END = 200  # characters of these: what is wrong mostly stands behind what was given
MAX_PARAM = 256  # characters of `param`, which may hold keys that the client chose
_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")
_MAX_VALIDATION_ERRORS = 3
_WORDS = {  # by pydantic's types of errors: those whose text is about Python, or does not say what to do
    "model_attributes_type": "input should be a JSON object",
    "model_type": "input should be a JSON object",
    "dict_type": "input should be a JSON object",
    "none_required": "this is not served: leave it out, or give null",
    "union_tag_invalid": "the type {tag!r} is none of {expected_tags}",
    "union_tag_not_found": "it needs a type",
}
_MAX_COMPARED = 100  # errors of one request: each is compared with each


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """What every answer other than 200 holds."""

    error: ErrorDetail


class ApiError(HTTPException):
    """An answer that is an error.

    Attributes:
        type: "invalid_request_error", "server_error", ...
        param: the field that is wrong, as a path like messages[0].role.
        code: a name for programs, like "model_not_found".
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.type = type
        self.param = param
        self.code = code

    def body(self) -> bytes:
        """ASCII: what the client sent comes back escaped, lone surrogates included."""
        message = _ADDRESS.sub("", str(self.detail))
        if len(message) > MAX_MESSAGE:
            message = message[: -_KEPT_END + MAX_MESSAGE - 1] + "…" + message[-_KEPT_END:]
        param = None if self.param is None else self.param[:MAX_PARAM]
        error = {"message": message, "type": self.type, "param": param, "code": self.code}
        return json.dumps({"error": error}).encode("ascii")

    def response(self) -> Response:
        headers = dict(self.headers or {})
        return Response(self.body(), self.status_code, headers, media_type="application/json")


class FieldError(InvalidRequestError):
    """One field of a request is wrong."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def to_api_error(error: Exception, field: str | None = None) -> ApiError:
    """The answer for an exception. If the request cannot have caused it, the log has the details, and the answer has none.

    Args:
        field: `param` of a wrong request's error if the error itself names no field.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextLengthExceededError):
        return ApiError(400, str(error), param=field, code="context_length_exceeded")
    if isinstance(error, InvalidRequestError):
        return ApiError(400, str(error), param=error.param if isinstance(error, FieldError) else field)
    if isinstance(error, TokenizerError):  # no chat template; one in the request that is no Jinja
        return ApiError(400, str(error), param=field)
    if isinstance(error, OverloadedError):
        headers = {"Retry-After": str(error.retry_after_seconds)}
        return ApiError(503, str(error), type="overloaded_error", code="overloaded", headers=headers)
    if isinstance(error, RequestTimeoutError):
        return ApiError(504, str(error), type="timeout_error", code="request_timeout")
    if isinstance(error, EngineClosedError):
        message = "the server is shutting down and takes no new requests"
        return ApiError(503, message, type="server_error", code="shutting_down", headers={"Retry-After": "1"})
    if isinstance(error, EngineDeadError):
        message = f"the engine has failed: {error.summary}" if error.summary else "the engine is not running"
        return ApiError(503, message, type="server_error", code="engine_dead")
    logger.error("a request failed", exc_info=error)
    name = "engine_error" if isinstance(error, InflightError) else "internal_error"
    return ApiError(500, "the server failed to answer this request", type="server_error", code=name)


def add_error_handlers(app: FastAPI) -> None:
    async def on_error(_: Request, error: Exception) -> Response:
        return to_api_error(error).response()

    async def on_validation(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _validation_error(error.errors(), error.body).response()

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return (error if isinstance(error, ApiError) else _http_error(request, error)).response()

    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(InflightError, on_error)
    app.add_exception_handler(Exception, on_error)


def _http_error(request: Request, error: HTTPException) -> ApiError:
    """What the router raises: there is no such path, or it has no such method."""
    if error.status_code == 404:
        return ApiError(404, f"there is no {request.url.path} here", code="not_found")
    if error.status_code == 405:
        message = f"{request.url.path} does not take {request.method}"
        allowed = (error.headers or {}).get("Allow", "")
        headers = {"Allow": f"{allowed}, HEAD" if "GET" in allowed else allowed}  # the server answers HEAD as GET
        return ApiError(405, message, code="method_not_allowed", headers=headers)
    phrase = HTTPStatus(error.status_code).phrase.lower()
    return ApiError(error.status_code, phrase, headers=error.headers)


def _validation_error(errors: Sequence[Any], body: object) -> ApiError:  # Any: pydantic's error dicts
    """One message of pydantic's several; `param` is the first field that is wrong."""
    told: dict[str, dict[str, None]] = {}
    compared = errors[:_MAX_COMPARED]
    # a list of too many items: they fit this branch of a union, and no other branch
    too_long = [error for error in compared if error["type"] == "too_long"]
    for error in too_long or compared:
        told.setdefault(_where(error, body), {})[_what(error)] = None
    # report the branches of a union that matched furthest; if all fail at the same place, report what each of them wants
    furthest = [where for where in told if not any(other.startswith((f"{where}.", f"{where}[")) for other in told)]
    furthest = _without_wrong_type(furthest)
    whats = {where: " or ".join(told[where]) for where in furthest[:_MAX_VALIDATION_ERRORS]}
    messages = [f"{where}: {what}" if where else what for where, what in whats.items()]
    return ApiError(400, "; ".join(messages), param=furthest[0] or None)


def _what(error: Mapping[str, Any]) -> str:
    if error["type"] == "missing":
        return "this field is required" if len(error["loc"]) > 1 else "the body is missing; send a JSON object"
    if error["type"] in _WORDS:
        return _WORDS[error["type"]].format(**error.get("ctx", {}))
    text = str(error["msg"]).replace(" after validation", "")
    return text[:1].lower() + text[1:]


def _without_wrong_type(places: Sequence[str]) -> list[str]:
    """Where the type of an object is wrong, what else it lacks is of another type."""
    wrong = [place.removesuffix("type") for place in places if place.endswith(".type")]
    return [place for place in places if place.endswith(".type") or not place.startswith(tuple(wrong))]


def _where(error: Mapping[str, Any], body: object) -> str:
    """("body", "messages", 0, "role") -> "messages[0].role". pydantic puts the names of a union's branches between the fields:
    a part that is not a key of the object at this place is such a name."""
    loc: Sequence[str | int] = error["loc"]
    path, value = "", body
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
