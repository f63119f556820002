"""`named_field`: which field of a request an engine's error is about. The engine knows parameters, and no requests.

Its messages begin with the name of what is wrong: "min_tokens=10 is more than max_tokens=3". That is the request's field, but
for constraints of the text, which a request has under several names.
"""

from __future__ import annotations

import re

from inflight.entrypoints.openai.model import StrictModel
from inflight.errors import ContextLengthExceededError, TokenizerError
from inflight.sampling_params import CONSTRAINTS

_PATH = re.compile(r"(?:the )?([a-z_]+)((?:\[\d+\]|\['\w+'\]|\.[a-z_]+)*)")
_KEY = re.compile(r"\['(\w+)'\]")
_OF_CONSTRAINTS = {*CONSTRAINTS, "structured_outputs", "whitespace_pattern", "separators", "disable_any_whitespace"}
# the fields by which a request constrains the text; tools do so, too
_CONSTRAINING = "response_format structured_outputs guided_json guided_regex guided_choice guided_grammar tools".split()


def named_field(error: Exception, body: StrictModel, prompt_field: str) -> str | None:
    """The path of a field that `body` has, as messages[0]; None where the message names none.

    Args:
        prompt_field: what the prompt is made of.
    """
    if isinstance(error, ContextLengthExceededError):
        return prompt_field
    if isinstance(error, TokenizerError):
        return "chat_template" if _has(body, "chat_template") else None
    match = _PATH.match(str(error))
    if match is None:
        return None
    name, path = match.groups()
    if name == "prompt":
        return prompt_field
    if name in _OF_CONSTRAINTS:
        return next((field for field in _CONSTRAINING if _has(body, field)), None)
    return name + _KEY.sub(r".\1", path) if _has(body, name) else None


def _has(body: StrictModel, name: str) -> bool:
    return name in type(body).model_fields and getattr(body, name) is not None
