"""The forms in which an error is written: OpenAI's, Anthropic's for clients of /v1/messages, and Ollama's for those of /api."""

import re
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

# status, message, type, param, code -> the JSON object of the answer
ErrorForm = Callable[[int, str, str, str | None, str | None], Mapping[str, object]]

_MESSAGES = "/v1/messages"
_OLLAMA = "/api/"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


def openai_error(status: int, message: str, kind: str, param: str | None, code: str | None) -> Mapping[str, object]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def anthropic_error(status: int, message: str, kind: str, param: str | None, code: str | None) -> Mapping[str, object]:
    """Anthropic's types follow from the status."""
    other = "api_error" if status >= 500 else "invalid_request_error"
    error = {"type": _ANTHROPIC_TYPES.get(status, other), "message": _with_field(message, param)}
    return {"type": "error", "error": error}


def ollama_error(status: int, message: str, kind: str, param: str | None, code: str | None) -> Mapping[str, object]:
    return {"error": _with_field(message, param)}


def _with_field(message: str, param: str | None) -> str:
    """A message that names the wrong field."""
    return message if param is None or re.split(r"\W", param)[0] in message else f"{param}: {message}"


def error_form(scope: MutableMapping[str, Any]) -> ErrorForm:  # Any: ASGI's own
    """The form that the client of a request reads. Anthropic's clients name a version of its API in each request, also for
    paths that both APIs have."""
    path = scope["path"]
    is_anthropics = path == _MESSAGES or path.startswith(f"{_MESSAGES}/")
    if is_anthropics or any(name == b"anthropic-version" for name, _ in scope.get("headers", ())):
        return anthropic_error
    return ollama_error if path.startswith(_OLLAMA) else openai_error
