"""Messages of one role become one."""

from collections.abc import Sequence
from typing import Any

from inflight.tokenizer.content_parts import THINKING, joined, text_part
from inflight.tokenizer.messages import REASONING_FIELDS, set_reasoning
from inflight.tokenizer.probes import Message

Content = str | list[dict[str, Any]] | None  # Any: JSON


def join(messages: Sequence[Message]) -> dict[str, Any]:
    """One message with the texts, the thoughts and the calls of all. It has the role of the first."""
    first = messages[0]
    if len(messages) == 1:
        return dict(first)
    made = {"role": first["role"], **{key: value for message in reversed(messages) for key, value in message.items()}}
    made |= {"role": first["role"], "content": join_contents([message.get("content") for message in messages])}
    thoughts = [message["reasoning_content"] for message in messages if message.get("reasoning_content")]
    if thoughts:
        for name in REASONING_FIELDS:
            made.pop(name, None)
        set_reasoning(made, "\n\n".join(thoughts))
    if any("tool_calls" in message for message in messages):
        made["tool_calls"] = [call for message in messages for call in message.get("tool_calls") or ()]
    if made["content"] is None:
        del made["content"]
    return made


def join_contents(contents: Sequence[Content]) -> Content:
    """One text, with an empty line between two. If there is a thought or an image among the parts, it is a list of parts."""
    filled = [content for content in contents if content]
    if len(filled) < 2:
        if filled:
            return filled[0]
        return next((content for content in contents if content is not None), None)
    if all(isinstance(content, str) or all(part["type"] == "text" for part in content) for content in filled):
        return "\n\n".join(content if isinstance(content, str) else joined(content) for content in filled)
    made: list[dict[str, Any]] = []
    for content in filled:
        made = _behind(made, _as_parts(content), "\n\n")
    return made


def with_text_before(text: str, message: Message) -> Content:
    """The content of a message without thoughts, behind this text. It is a list of parts if there are images."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return text + content
    parts = [part for part in content if part["type"] != THINKING]
    if all(part["type"] == "text" for part in parts):
        return text + joined(parts)
    return _behind([text_part(text)], parts, "")


def _behind(before: list[dict[str, Any]], parts: list[dict[str, Any]], between: str) -> list[dict[str, Any]]:
    """One list of both. Where a text follows a text, they become one, because templates write nothing between two parts."""
    if not before or before[-1]["type"] != "text" or parts[0]["type"] != "text":
        return [*before, *parts]
    return [*before[:-1], text_part(f"{before[-1]['text']}{between}{parts[0]['text']}"), *parts[1:]]


def _as_parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [text_part(content)] if isinstance(content, str) else content
