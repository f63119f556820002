"""`FieldNames`: which field of a request an error is about.

The engine knows parameters, and no fields. Its errors carry the path of the parameter that is wrong
(`InvalidRequestError.param`), as do the names of what it does not enforce (`SchemaPlace.param`). An API says once, here, which
fields its requests have instead.
"""

import re
from collections.abc import Mapping, Sequence

from pydantic import BaseModel

from inflight.entrypoints.fields.constraint_fields import ConstraintFields
from inflight.entrypoints.fields.field_error import FieldError
from inflight.entrypoints.http.errors import ApiError, to_api_error
from inflight.errors import InvalidRequestError, TokenizerError
from inflight.structured_outputs_params import CONSTRAINTS

PROMPT, MESSAGES, TOOLS = "prompt", "messages", "tools"
TASK, MODEL = "task", "model"  # the endpoint says the task, and the request names a model that does not do it
OPTIONS = "options."  # some clients have fields in an object of this name, whatever API they use
TEXT_FORM = "response_format"  # the engine's word for a form of the text that is not strict
_OF_TEXT_FORM = {
    *CONSTRAINTS,
    TEXT_FORM,
    "structured_outputs",
    "whitespace_pattern",
    "separators",
    "disable_any_whitespace",
}
# the path of a parameter: its name, and the place in its value, up to a key that is not plain
_PATH = re.compile(r"(\w+)((?:\[\d+\]|\['\w+'\]|\.\w+)*)")
_NUMBER = re.compile(r"\[(\d+)\]")
_KEY = re.compile(r"\['(\w+)'\]")


class FieldNames:
    """The fields of one request that mean the parameters of a `ChatRequest` or `TextRequest`. A parameter that is not named
    here has a field of the same name, if the request has such a field.

    Args:
        prompt: the field with the prompt or the messages.
        functions: the field of each function that the model sees. Those that it does not name are somewhere in `tools`.
        own: parameter -> the name that its field has, if the request has it.
    """

    def __init__(
        self,
        body: BaseModel,
        *,
        prompt: str = MESSAGES,
        functions: Sequence[str] = (),
        own: Mapping[str, str] | None = None,
    ) -> None:
        self._body = body
        self._prompt = prompt
        self._functions = functions
        self._own = own or {}
        # several fields can say what form the text must have
        self._text_form = body.constraint_name() if isinstance(body, ConstraintFields) else None

    def api_error(self, error: Exception) -> ApiError:
        """The answer for an exception. It names the field, if the request is wrong."""
        if isinstance(error, FieldError) or not isinstance(error, InvalidRequestError | TokenizerError):
            return to_api_error(error)
        param = error.param if isinstance(error, InvalidRequestError) else ""
        field = self.field(param)
        message = self.in_own_words(param, str(error))
        if field is not None and field == self._text_form and field not in message:
            # the errors of some APIs have no member for the field, so the message names it
            message = f"{field}: {message}"
        made = to_api_error(error, field)
        made.detail = message
        return made

    def in_own_words(self, param: str, text: str) -> str:
        """A text of the engine about a parameter. If it begins with the parameter, it begins with the field, if the field has
        another name: that of the form of the text, of a function, or one of `own`."""
        name, path = _split(param)
        number = _NUMBER.match(path) if name == TOOLS else None
        beginning = name if number is None else name + number[0]
        is_renamed = name == TEXT_FORM or name in self._own or number is not None
        own = self.field(param) if is_renamed and text.startswith(beginning) else None
        return text if own is None else own + text.removeprefix(beginning)

    def field(self, param: str) -> str | None:
        """The path of the field that means a parameter; None if the request does not have it, so that the server's default is
        wrong."""
        name, path = _split(param)
        if name == PROMPT:
            return self._prompt + path
        if name == MESSAGES and name != self._prompt:
            return self._prompt
        if name == TOOLS and (number := _NUMBER.match(path)) is not None:
            return self._function(int(number[1]))
        if self._has(own := self._own.get(name, "")):
            name = own
        if name in _OF_TEXT_FORM:
            return self._text_form or (TOOLS if self._has(TOOLS) else None)
        where = next((each for each in ("", OPTIONS) if self._has(each + name)), None)
        if where is None and name == TASK:
            return MODEL
        return None if where is None else where + name + _KEY.sub(r".\1", path)

    def _function(self, number: int) -> str:
        if number < len(self._functions):
            return self._functions[number]
        return TOOLS

    def _has(self, name: str) -> bool:
        holder = getattr(self._body, "options", None) if name.startswith(OPTIONS) else self._body
        name = name.removeprefix(OPTIONS)
        return isinstance(holder, BaseModel) and name in type(holder).model_fields and getattr(holder, name) is not None


def _split(param: str) -> tuple[str, str]:
    """The name of a parameter, and the place in its value: "messages" and "[1].role"."""
    match = _PATH.match(param)
    return (match[1], match[2]) if match is not None else ("", "")
