"""Small chat templates that refuse and lose what real ones refuse and lose, and conversations for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inflight.tokenizer.chat_template import ChatTemplate

# One word for each message: the first letter of the role, ":" and the text, and then each call as "(argument)".
WORD = (
    "{{ m.role[0] }}:{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.arguments.values() | join }}){% endfor %} "
)
LOOP, END = "{% for m in messages %}", "{% endfor %}"
TAKES_ALL = LOOP + WORD + END
# as Mistral's templates: calls and results are not counted
_COUNTED = "m.role == 'user' or (m.role == 'assistant' and not m.tool_calls)"
ALTERNATES = (
    "{% set n = namespace(i=0) %}{% for m in messages if m.role != 'system' %}{% if COUNTED %}"
    "{% if (m.role == 'user') != (n.i % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set n.i = n.i + 1 %}{% endif %}{% endfor %}"
).replace("COUNTED", _COUNTED) + TAKES_ALL
# as Gemma's: no role but two, no calls
TWO_ROLES = (
    LOOP + "{% if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no') }}"
    "{% endif %}{{ m.role[0] }}:{{ m.content | trim }} " + END
)
# as Llama's
ONE_CALL = (
    LOOP
    + "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    + WORD
    + END
)
FIRST_CALL = TAKES_ALL.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
CALLS_NEED_RESULTS = (
    LOOP + "{% if m.tool_calls and (loop.last or loop.nextitem.role != 'tool') %}{{ raise_exception('result') }}"
    "{% endif %}" + WORD + END
)

_ROLES = {"s": "system", "u": "user", "a": "assistant", "c": "assistant", "t": "tool"}


def conversation(roles: str) -> list[dict[str, Any]]:
    """Messages with the numbers of their places: of the system "s", of the user "u", an answer "a", an answer with a call "c",
    the result of the last call "t"."""
    found: list[dict[str, Any]] = []
    last_call = "none"
    for number, letter in enumerate(roles):
        message: dict[str, Any] = {"role": _ROLES[letter], "content": str(number)}
        if letter == "c":
            last_call = f"call{number}"
            message = {"role": "assistant", "content": None, "tool_calls": [call(str(number), last_call)]}
        elif letter == "t":
            message["tool_call_id"] = last_call
        found.append(message)
    return found


def call(argument: str, call_id: str | None = None) -> dict[str, Any]:
    made = {"type": "function", "function": {"name": "f", "arguments": {"a": argument}}}
    return made if call_id is None else {"id": call_id, **made}


def calling(*calls: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **more}


def result(text: str, call_id: str | None = None, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "content": text, **({} if call_id is None else {"tool_call_id": call_id}), **more}


def user(text: str = "?") -> dict[str, Any]:
    return {"role": "user", "content": text}


def render(source: str, messages: str | list[dict[str, Any]], **more: Any) -> str:
    """The prompt, with "+" for an empty line."""
    given = conversation(messages) if isinstance(messages, str) else messages
    text = ChatTemplate({"default": source}).render(given, **{"add_generation_prompt": False, **more})
    return text.replace("\n\n", "+").strip()
