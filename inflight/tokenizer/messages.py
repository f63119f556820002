"""Checks the input of a chat template (messages, tools, variables), and copies it into plain JSON data."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from inflight.errors import InvalidRequestError
from inflight.tokenizer.content_parts import THINKING

_MAX_DEPTH = 64
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
TOOL = "a JSON schema of a function"  # what each tool must be, for error messages
RESULT_ROLES = ("tool", "function")  # the second is that of OpenAI's older API
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Returns a plain copy of the messages, without the fields that are None, and without empty lists of calls.

    The content of a message may be a list of text parts, in a message of the assistant also of parts of the type "thinking". An
    image is a part {"type": "image", "number": N} (`image_parts.py`).

    Raises:
        InvalidRequestError: a message is malformed; the error names the message and the problem.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise InvalidRequestError(
            f"messages is a {type(messages).__name__}; give a list of {{'role', 'content'}} dicts", "messages"
        )
    if not messages:
        raise InvalidRequestError("messages is empty; give at least one message", "messages")
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _check_message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{where} is a {type(message).__name__}, not a dict with 'role' and 'content'", where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"{where} has role={role!r}; it must be a string like 'user'", where)
    content = message.get("content")
    if content is None and role in RESULT_ROLES:  # a tool may return nothing
        message, content = {**message, "content": ""}, ""
    if content is None and role != "assistant":  # an assistant's message may have only tool calls
        raise InvalidRequestError(f"{where} (role {role!r}) has no content", where)
    given = {key: value for key, value in message.items() if value is not None}
    checked = {key: plain_json(value, f"{where}[{key!r}]") for key, value in given.items()}
    if checked.get("tool_calls") == []:
        del checked["tool_calls"]
    if content is not None:
        content = _result_text(checked["content"]) if role in RESULT_ROLES else checked["content"]
        checked["content"] = _check_content(content, f"{where}['content']", role)
    # as in transformers, the first of these fields counts
    reasoning = next((checked[name] for name in REASONING_FIELDS if name in checked), None)
    if reasoning is not None:
        set_reasoning(checked, reasoning)
    return checked


def _result_text(content: Any) -> Any:
    """What a tool returns may be any JSON value. A value that is no text, and no list of parts, becomes text in JSON."""
    if isinstance(content, str) or (
        isinstance(content, list)
        and all(isinstance(part, dict) and isinstance(part.get("type"), str) for part in content)
    ):
        return content
    return json.dumps(content, ensure_ascii=False)


def _check_content(content: Any, where: str, role: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(
            f"{where} is a {type(content).__name__}; it must be text or a list of text parts", where
        )
    return [_check_part(part, f"{where}[{i}]", role) for i, part in enumerate(content)]


def _check_part(part: Any, where: str, role: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind == THINKING and role == "assistant":
        return {"type": THINKING, THINKING: _thought(part.get(THINKING), where)}
    if kind == "image" and isinstance(part.get("number"), int):
        return {"type": kind, "number": part["number"]}
    if kind != "text":
        raise InvalidRequestError(f"{where} is of type {kind!r}; this model reads 'text' parts only", where)
    if not isinstance(part.get("text"), str):
        raise InvalidRequestError(f"{where} is a text part without a string 'text'", where)
    checked: dict[str, Any] = part
    return checked


def _thought(value: Any, where: str) -> str:
    """The text of a thought. Mistral's client sends it as a list of text parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequestError(
            f"{where} is a part of type {THINKING!r} without a text or a list of text parts in {THINKING!r}", where
        )
    parts = (_check_part(part, f"{where}[{THINKING!r}][{i}]", "") for i, part in enumerate(value))
    return "".join(part["text"] for part in parts)


def set_reasoning(message: dict[str, Any], reasoning: str) -> None:
    """Newer templates read the field reasoning_content, and the template of gpt-oss reads thinking."""
    message.setdefault("thinking", reasoning)
    message["reasoning_content"] = reasoning


def check_template_kwargs(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns a plain copy of `kwargs`, the further variables of the template. A variable such as "messages" is refused,
    because `ChatTemplate.render` has an argument for it."""
    if taken := sorted(_RESERVED & set(kwargs or {})):
        raise InvalidRequestError(
            f"chat_template_kwargs may not set {', '.join(taken)}; give them as arguments of their own",
            "chat_template_kwargs",
        )
    return {str(name): plain_json(value, f"chat_template_kwargs[{name!r}]") for name, value in (kwargs or {}).items()}


def check_objects(values: object, name: str, what: str) -> list[dict[str, Any]] | None:
    """Returns a plain copy of a list of objects. For error messages: `name` is the argument, and `what` says what each entry
    must be."""
    if values is None:
        return None
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise InvalidRequestError(
            f"{name} is a {type(values).__name__}; give a list in which each entry is {what}", name
        )
    checked = []
    for i, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise InvalidRequestError(f"{name}[{i}] is a {type(value).__name__}; it must be {what}", f"{name}[{i}]")
        checked.append(plain_json(value, f"{name}[{i}]"))
    return checked


def plain_json(value: Any, where: str, depth: int = 0) -> Any:
    """Returns a copy that consists only of str, int, float, bool, None, list and dict, so templates can call no other code.

    Raises:
        InvalidRequestError: `value` contains a value of another type, or is nested too deeply.
    """
    if depth > _MAX_DEPTH:
        raise InvalidRequestError(f"{where} is nested more than {_MAX_DEPTH} deep", where)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # for a str enum: its text, not its name
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float) and math.isfinite(value):
        return float.__float__(value)
    if isinstance(value, Mapping):
        if bad := [key for key in value if not isinstance(key, str)]:
            raise InvalidRequestError(f"{where} has the key {bad[0]!r}; keys must be strings", where)
        return {str.__str__(key): plain_json(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    what = repr(value) if isinstance(value, float) else f"a {type(value).__name__}"
    raise InvalidRequestError(f"{where} is {what}; only JSON data is allowed there", where)
