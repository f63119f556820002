"""`FieldNames`: which field of a request an error is about.

The engine knows parameters, and no fields. Each of its errors begins with the path of the parameter that is wrong, as in
"min_tokens=10 is more than max_tokens=3" or "messages[1] has no role". So do the names of what it does not enforce. This path
is read once, here, and an API says once which fields its requests have instead.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from pydantic import BaseModel

from inflight.entrypoints.fields.constraint_fields import ConstraintFields
from inflight.entrypoints.fields.field_error import FieldError
from inflight.entrypoints.http.errors import ApiError, to_api_error
from inflight.errors import ContextLengthExceededError, InvalidRequestError, TokenizerError
from inflight.structured_outputs_params import CONSTRAINTS

PROMPT, MESSAGES, TOOLS = "prompt", "messages", "tools"
TEXT_FORM = "response_format"  # the engine's word for a form of the text that is not strict
_OF_TEXT_FORM = {
    *CONSTRAINTS,
    TEXT_FORM,
    "structured_outputs",
    "whitespace_pattern",
    "separators",
    "disable_any_whitespace",
}
_PATH = re.compile(r"(?:the )?([a-z_]+)((?:\[\d+\]|\['\w+'\]|\.[a-z_]+)*)")
_NUMBER = re.compile(r"\[(\d+)\]")
_KEY = re.compile(r"\['(\w+)'\]")


class Place(NamedTuple):
    """The path of a parameter: "messages" and "[0].role"."""

    parameter: str
    path: str

    @classmethod
    def of(cls, text: str) -> "Place | None":
        match = _PATH.match(text)
        if match is None:
            return None
        return cls(match[1], _KEY.sub(r".\1", match[2]))


class FieldNames:
    """The fields of one request that mean the parameters of a `ChatRequest` or `TextRequest`. A parameter that is not named
    here has a field of the same name, if the request has such a field.

    Args:
        prompt: the field with the prompt or the messages.
        functions: the field of each function that the model sees. Those that it does not name are somewhere in `tools`.
    """

    def __init__(self, body: BaseModel, *, prompt: str = MESSAGES, functions: Sequence[str] = ()) -> None:
        self._body = body
        self._prompt = prompt
        self._functions = functions
        # several fields can say what form the text must have
        self._text_form = body.constraint_name() if isinstance(body, ConstraintFields) else None

    def api_error(self, error: Exception) -> ApiError:
        """The answer for an exception. It names the field, if the request is wrong."""
        if isinstance(error, FieldError) or not isinstance(error, InvalidRequestError | TokenizerError):
            return to_api_error(error)
        field = self._field_of(error)
        message = self.in_own_words(str(error))
        if field is not None and field == self._text_form and field not in message:
            # the errors of some APIs have no member for the field, so the message names it
            message = f"{field}: {message}"
        made = to_api_error(error, field)
        made.detail = message
        return made

    def in_own_words(self, text: str) -> str:
        """A text of the engine that begins with a parameter. It begins with the field, if the field has another name: that of
        the form of the text, or of a function."""
        place = Place.of(text)
        if place is not None and place.parameter == TEXT_FORM and self._text_form is not None:
            return self._text_form + text.removeprefix(TEXT_FORM)
        if place is not None and place.parameter == TOOLS and (number := _NUMBER.match(place.path)) is not None:
            return self._function(int(number[1])) + text.removeprefix(TOOLS + number[0])
        return text

    def _field_of(self, error: Exception) -> str | None:
        if isinstance(error, ContextLengthExceededError):
            return self._prompt
        place = None if isinstance(error, TokenizerError) else Place.of(str(error))
        return None if place is None else self.field(place)

    def field(self, place: Place) -> str | None:
        """The path of the field; None if the request does not have it, so that the server's default is wrong."""
        name, path = place
        if name == PROMPT or (name == MESSAGES and name != self._prompt):
            return self._prompt
        if name == TOOLS and (number := _NUMBER.match(path)) is not None:
            return self._function(int(number[1]))
        if name in _OF_TEXT_FORM:
            return self._text_form or (TOOLS if self._has(TOOLS) else None)
        return name + path if self._has(name) else None

    def _function(self, number: int) -> str:
        if number < len(self._functions):
            return self._functions[number]
        return TOOLS

    def _has(self, name: str) -> bool:
        return name in type(self._body).model_fields and getattr(self._body, name) is not None
