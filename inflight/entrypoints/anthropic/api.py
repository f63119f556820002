"""Anthropic's API, as a row of the table of APIs, and its form of errors."""

from collections.abc import Mapping

from inflight.entrypoints.http.api import Api, with_field

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_form(status: int, message: str, kind: str, param: str | None, code: str | None) -> Mapping[str, object]:
    """Anthropic's types follow from the status."""
    other = "api_error" if status >= 500 else "invalid_request_error"
    error = {"type": _TYPES.get(status, other), "message": with_field(message, param)}
    return {"type": "error", "error": error}


API = Api(
    routes="inflight.entrypoints.anthropic.routes",
    endpoints={"/v1/messages": "POST", "/v1/messages/count_tokens": "POST"},
    title="Anthropic",
    paths=("/v1/messages", "/v1/messages/"),
    header=b"anthropic-version",  # clients send it to all paths, also to those that several APIs have
    error_form=error_form,
    versioned=("/messages",),
    instead={"/messages": ": use /v1/messages"},
)
