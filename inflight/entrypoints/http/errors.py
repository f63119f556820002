"""Turns each exception into an answer in the form of errors that the client reads (`error_form`).

The answer names the client's mistake, or it says that the server failed. It never contains a file's path, a traceback or an
address in memory.
"""

import json
import logging
import re
from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.responses import Response

from inflight.entrypoints.fields.field_error import FieldError
from inflight.entrypoints.http.api import ErrorForm, plain_error
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

logger = logging.getLogger(__name__)

MAX_MESSAGE = 1000  # characters; a message may quote text of any length from the request
_KEPT_END = 200  # characters kept at the end of a message that is cut, because the end usually says what is wrong
MAX_PARAM = 256  # characters of `param`, which may contain names that the client chose
_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")


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

    def body(self, form: ErrorForm = plain_error) -> bytes:
        """The JSON of the answer, in ASCII. All other characters are escaped, so even a lone surrogate in a client's text
        causes no error."""
        message = _ADDRESS.sub("", str(self.detail))
        if len(message) > MAX_MESSAGE:
            message = message[: -_KEPT_END + MAX_MESSAGE - 1] + "…" + message[-_KEPT_END:]
        param = None if self.param is None else self.param[:MAX_PARAM]
        return json.dumps(form(self.status_code, message, self.type, param, self.code)).encode("ascii")

    def response(self, form: ErrorForm = plain_error) -> Response:
        return Response(self.body(form), self.status_code, dict(self.headers or {}), media_type="application/json")


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
    # The steps of this request fail, or end processes. Some clients would send it twice more without this header.
    headers = {"x-should-retry": "false"} if isinstance(error, EngineError) else {}
    message = "the server failed to answer this request"
    return ApiError(500, message, type="server_error", code=name, headers=headers)
