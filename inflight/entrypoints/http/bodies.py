"""The JSON objects that answers of several APIs have, as typed dicts. Endpoints return them, and /openapi.json shows them.

A member that may be absent is `NotRequired`. Every other member is always present, and may be null if its type contains None.
"""

from typing import NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12


@with_config(ConfigDict(extra="forbid"))
class Body(TypedDict):
    """The base class of all objects. An object has only the members that its class declares."""


class PromptTokensDetails(Body):
    cached_tokens: int


class CompletionTokensDetails(Body):
    reasoning_tokens: int


class Usage(Body):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]


class TopLogprob(Body):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class Version(Body):
    version: str


class Status(Body):
    status: str


class Readiness(Status, total=False):
    engines: dict[str, str]  # of each replica, if there are several


class ErrorDetail(Body):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Body):
    """The body of every answer that is an error."""

    error: ErrorDetail
