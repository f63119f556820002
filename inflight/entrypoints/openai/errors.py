"""Turns each exception into an answer with OpenAI's form of errors, {"error": {"message", "type", "param", "code"}}, or in
the form of another API (`error_form`).

The answer names the client's mistake, or it says that the server failed. It never contains a file's path, a traceback or an
address in memory.
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

from inflight.entrypoints.serve.error_form import ErrorForm, error_form, openai_error
from inflight.errors import (
    ContextLengthExceededError,
    EngineClosedError,
    EngineDeadError,
    EngineError,
    EngineRecoveringError,
    InflightError,
    InvalidRequestError,
    OverloadedError,
    RequestTimeoutError,
    TokenizerError,
)
from inflight.structured_outputs_params import CONSTRAINTS

logger = logging.getLogger(__name__)

MAX_MESSAGE = 1000  # characters; a message may quote text of any length from the request
_KEPT_END = 200  # characters kept at the end of a message that is cut, because the end usually says what is wrong
MAX_PARAM = 256  # characters of `param`, which may contain names that the client chose
_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")
_MAX_VALIDATION_ERRORS = 3
_WORDS = {  # type of pydantic's error -> our message, if pydantic's message is about Python or does not help the client
    "model_attributes_type": "input should be a JSON object",
    "model_type": "input should be a JSON object",
    "dict_type": "input should be a JSON object",
    "none_required": "this is not served: leave it out, or give null",
    "union_tag_invalid": "the type {tag!r} is none of {expected_tags}",
    "union_tag_not_found": 'the field "type" is required',
}
# the type of a tool or a tool_choice -> our message
_INSTEAD_OF_TYPES = {
    "custom": "custom tools are not served: give a function with one parameter of type string",
    "allowed_tools": "allowed_tools is not served: send only these tools, with tool_choice auto or required",
    **dict.fromkeys(
        "web_search web_search_preview file_search code_interpreter computer_use_preview mcp image_generation".split(),
        "the server runs no tools: give a function that your program runs",
    ),
}
_ONLY_TEXT = ": this server only generates text (/v1/chat/completions, /v1/completions)"
# the beginning of paths -> some of them
_BEGINNINGS = {
    "/v1": "/v1/chat/completions, /v1/models",
    "/v1/chat": "/v1/chat/completions",
    "/api": "/api/chat, /api/tags",
}
# the beginning of a path of another API, without /v1 -> what to use instead
_INSTEAD = {
    "/responses": ": POST the whole conversation to /v1/responses, because no responses are stored",  # OpenAI
    "/messages": ": use /v1/messages",  # Anthropic
    "/v1": ": /v1 comes twice, use it once in the base URL",
    "/models": ": /v1/models lists the models",
    "/api": ": the server has one model, which cannot be changed",  # Ollama
    "/infill": ": use /v1/completions with suffix",  # llama.cpp
    "/generate_stream": ": use /v1/completions with stream",  # TGI, SGLang
    # /complete: Anthropic; /completion: llama.cpp; /generate: TGI, SGLang
    **dict.fromkeys("/completions /complete /engines /completion /generate".split(), ": use /v1/completions"),
    **dict.fromkeys("/chat/completions /threads /assistants".split(), ": use /v1/chat/completions"),
    **dict.fromkeys("/embeddings /embed /embedding /rerank /score /pooling /classify /moderations".split(), _ONLY_TEXT),
    **dict.fromkeys("/images /audio /realtime /videos".split(), _ONLY_TEXT),
    **dict.fromkeys("/files /batches /fine_tuning /uploads /vector_stores".split(), ": nothing is stored here"),
}
_PATH = re.compile(r"(?:the )?([a-z_]+)((?:\[\d+\]|\['\w+'\]|\.[a-z_]+)*)")
_KEY = re.compile(r"\['(\w+)'\]")
RESPONSE_FORMAT = "response_format"  # the engine's name for the schema of a text that is not strict
_OF_CONSTRAINTS = {
    *CONSTRAINTS,
    RESPONSE_FORMAT,
    "structured_outputs",
    "whitespace_pattern",
    "separators",
    "disable_any_whitespace",
}
_MAX_COMPARED = 100  # pydantic's errors that are read for one answer; each of them is compared with all others


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

    def body(self, form: ErrorForm = openai_error) -> bytes:
        """The JSON of the answer, in ASCII. All other characters are escaped, so even a lone surrogate in a client's text
        causes no error."""
        message = _ADDRESS.sub("", str(self.detail))
        if len(message) > MAX_MESSAGE:
            message = message[: -_KEPT_END + MAX_MESSAGE - 1] + "…" + message[-_KEPT_END:]
        param = None if self.param is None else self.param[:MAX_PARAM]
        return json.dumps(form(self.status_code, message, self.type, param, self.code)).encode("ascii")

    def response(self, form: ErrorForm = openai_error) -> Response:
        return Response(self.body(form), self.status_code, dict(self.headers or {}), media_type="application/json")


class FieldError(InvalidRequestError):
    """One field of a request is wrong."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def to_api_error(error: Exception, field: str | None = None) -> ApiError:
    """Returns the answer for an exception. If the server is the cause, the details go to the log, not into the answer.

    Args:
        field: the `param` of the answer if the request is wrong and `error` does not name the wrong field itself.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, (InvalidRequestError, TokenizerError)):
        # A TokenizerError means here that the model has no chat template.
        code = "context_length_exceeded" if isinstance(error, ContextLengthExceededError) else None
        return ApiError(400, str(error), param=error.param if isinstance(error, FieldError) else field, code=code)
    if isinstance(error, OverloadedError):
        headers = {"Retry-After": str(error.retry_after_seconds)}
        return ApiError(503, str(error), type="overloaded_error", code="overloaded", headers=headers)
    if isinstance(error, RequestTimeoutError):
        return ApiError(504, str(error), type="timeout_error", code="request_timeout")
    if isinstance(error, EngineClosedError):
        message = "the server is shutting down and accepts no new requests"
        return ApiError(503, message, type="server_error", code="shutting_down", headers={"Retry-After": "1"})
    if isinstance(error, EngineRecoveringError):
        return ApiError(500, str(error), type="server_error", code="engine_recovering")
    if isinstance(error, EngineDeadError):
        message = f"the engine has failed: {error.summary}" if error.summary else "the engine is not running"
        return ApiError(503, message, type="server_error", code="engine_dead")
    logger.error("a request failed", exc_info=error)
    name = "engine_error" if isinstance(error, InflightError) else "internal_error"
    # The steps of this request fail, or end processes. OpenAI's clients would send it twice more without this header.
    headers = {"x-should-retry": "false"} if isinstance(error, EngineError) else {}
    message = "the server failed to answer this request"
    return ApiError(500, message, type="server_error", code=name, headers=headers)


def named_field(error: Exception, body: BaseModel, constraint: str | None = None) -> str | None:
    """Returns the field of the request that an error of the engine is about, as a path such as messages[0]. None if the field
    is not known.

    The engine does not know the fields of requests. But its messages begin with the name of the wrong parameter, as in
    "min_tokens=10 is more than max_tokens=3", and usually the field has the same name. A constraint of the text can come from
    several fields: `constraint` is the one that the request has.
    """
    prompt_field = next((name for name in ("messages", "input") if _has(body, name)), "prompt")
    if isinstance(error, ContextLengthExceededError):
        return prompt_field
    if isinstance(error, TokenizerError):
        return None
    match = _PATH.match(str(error))
    if match is None:
        return None
    name, path = match.groups()
    if name == "prompt" or (name == "messages" and not _has(body, name)):
        return prompt_field
    if name == "tools" and prompt_field == "input":
        return name  # the number is that of a tool of the chat, which may have another number in the request
    if name in _OF_CONSTRAINTS:
        return constraint or ("tools" if _has(body, "tools") else None)
    return name + _KEY.sub(r".\1", path) if _has(body, name) else None


def _has(body: BaseModel, name: str) -> bool:
    return name in type(body).model_fields and getattr(body, name) is not None


def add_error_handlers(app: FastAPI) -> None:
    async def on_error(request: Request, error: Exception) -> Response:
        return to_api_error(error).response(error_form(request.scope))

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _validation_error(error.errors(), error.body).response(error_form(request.scope))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if request.method == "OPTIONS" and error.status_code == 405:  # say which methods the path has
            return Response(status_code=204, headers={"Allow": f"{(error.headers or {}).get('Allow', '')}, OPTIONS"})
        told = error if isinstance(error, ApiError) else _http_error(request, error)
        return told.response(error_form(request.scope))

    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(InflightError, on_error)
    app.add_exception_handler(Exception, on_error)


def _http_error(request: Request, error: HTTPException) -> ApiError:
    """Returns the answer for an error of the router: the server has no such path, or the path does not support the method."""
    if error.status_code == 404:
        path = request.url.path
        if (examples := _BEGINNINGS.get(path.rstrip("/"))) is not None:
            message = (
                f"there is no page at {path}: this is how paths begin, such as {examples}; browsers find a page at /"
            )
        else:
            message = f"there is no {path} here{_instead_of(path)}; the API is under /v1, its description at /docs"
        return ApiError(404, message, code="not_found")
    if error.status_code == 405:
        message = f"{request.url.path} does not support the method {request.method}"
        allowed = (error.headers or {}).get("Allow", "")
        headers = {"Allow": f"{allowed}, HEAD" if "GET" in allowed else allowed}  # the server answers HEAD like GET
        return ApiError(405, message, code="method_not_allowed", headers=headers)
    return ApiError(error.status_code, HTTPStatus(error.status_code).phrase.lower(), headers=error.headers)


def _instead_of(path: str) -> str:
    """What to use instead of a path of another API; "" for an unknown path."""
    path = path.rstrip("/").removeprefix("/v1")
    return next((text for begin, text in _INSTEAD.items() if path == begin or path.startswith(f"{begin}/")), "")


def _validation_error(errors: Sequence[Any], body: object) -> ApiError:  # Any: pydantic's error dicts
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
    furthest = _without_wrong_type(furthest)
    whats = {where: " or ".join(told[where]) for where in furthest[:_MAX_VALIDATION_ERRORS]}
    messages = [f"{where}: {what}" if where else what for where, what in whats.items()]
    return ApiError(400, "; ".join(messages), param=furthest[0] or None)


def _what(error: Mapping[str, Any]) -> str:
    if error["type"] == "missing":
        return "this field is required" if len(error["loc"]) > 1 else "the body is missing; send a JSON object"
    if error["type"] in _WORDS:
        return _WORDS[error["type"]].format(**error.get("ctx", {}))
    if error["type"] == "literal_error" and error["loc"][-1] == "type" and isinstance(error["input"], str):
        text = _INSTEAD_OF_TYPES.get(error["input"], "")
        if text:
            return text
    text = str(error["msg"]).replace(" after validation", "")
    return text[:1].lower() + text[1:]


def _without_wrong_type(places: Sequence[str]) -> list[str]:
    """If the "type" of an object is wrong, drop the object's other errors, because they are about another type's fields."""
    wrong = [place.removesuffix("type") for place in places if place.endswith(".type")]
    return [place for place in places if place.endswith(".type") or not place.startswith(tuple(wrong))]


def _where(error: Mapping[str, Any], body: object) -> str:
    """The path of an error, such as "messages[0].role" for ("body", "messages", 0, "role"). If a field may have several types,
    pydantic's path also contains the name of a type, which is left out here. A part of the path is the name of a type if the
    object at this place has no such key."""
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
