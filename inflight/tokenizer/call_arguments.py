"""In which form a chat template reads the arguments of tool calls: as a JSON object, or as the text of one.

Most templates need the object, because they convert it to JSON or loop over it. Some join the arguments with other texts: an
object ends in an error there, or as Python text in the prompt. Some convert an object with a filter that escapes the texts
around it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic_core import from_json

from inflight.tokenizer.probes import QUESTION, Message, Render, a_call, a_result, a_tool, first_rendered

_ARGUMENTS = {"probe_key": 71930}  # the number stands in no other part of the prompt
_ESCAPED_QUOTE = "&#34;"
_CUT = '{"probe_key": "cu'


def need_text(render: Render) -> bool:
    """Whether a template writes the arguments of an invented call as JSON only if they are text."""
    text = json.dumps(_ARGUMENTS)
    of_object = _render_call(render, _ARGUMENTS)
    is_written = str(_ARGUMENTS["probe_key"]) in of_object
    if is_written and str(_ARGUMENTS) not in of_object and _ESCAPED_QUOTE not in of_object:
        return False
    of_text = _render_call(render, text)
    return text in of_text and _ESCAPED_QUOTE not in of_text


def takes_cut_text(render: Render) -> bool:
    """Whether a template writes arguments that are no JSON object as they are. A model may have made a mistake, or `max_tokens`
    may have cut them off. A template that converts arguments to JSON writes their text as a quoted string."""
    return _CUT in _render_call(render, _CUT)


def parse_object(text: str, allow_partial: Literal[False, "trailing-strings"] = False) -> dict[str, Any] | None:
    """The JSON object in `text`, or None if `text` is not a JSON object. NaN and infinite numbers are not JSON."""
    try:
        value = from_json(text, allow_partial=allow_partial)
        json.dumps(value, allow_nan=False)  # raises ValueError for NaN and for an infinite number, such as 1e999
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def readable_part(text: str) -> dict[str, Any]:
    """The readable part of malformed arguments: {"city": ""} for '{"city": "', and {} for text that is not JSON at all."""
    return parse_object(text, allow_partial="trailing-strings") or {}


def called_with_objects(conversation: Sequence[Message]) -> list[dict[str, Any]]:
    """The functions of calls whose arguments are an object."""
    calls = [
        call
        for message in conversation
        if isinstance(message.get("tool_calls"), list)
        for call in message["tool_calls"]
    ]
    functions = [call.get("function") for call in calls if isinstance(call, dict)]
    return [each for each in functions if isinstance(each, dict) and isinstance(each.get("arguments"), dict)]


def _render_call(render: Render, arguments: Mapping[str, Any] | str) -> str:
    """Renders a conversation with a call, and with its result if the template needs one; "" if the template refuses both. Some
    templates write a call only if the content is null."""
    written = arguments if isinstance(arguments, str) else str(_ARGUMENTS["probe_key"])
    found = ""
    for content in ("", None):
        turns = [QUESTION, {**a_call(arguments), "content": content}, a_result()]
        found = first_rendered(render, (turns[:2], turns), [a_tool(*_ARGUMENTS)])
        if written in found:
            break
    return found
