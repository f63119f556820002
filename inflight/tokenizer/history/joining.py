"""Messages of one role become one."""

from collections.abc import Sequence
from typing import Any

from inflight.tokenizer.content_parts import joined
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
    """One text, with an empty line between two. If there is a thought among the parts, it is a list of parts."""
    filled = [content for content in contents if content]
    if len(filled) < 2:
        if filled:
            return filled[0]
        return next((content for content in contents if content is not None), None)
    if all(isinstance(content, str) or all(part["type"] == "text" for part in content) for content in filled):
        return "\n\n".join(content if isinstance(content, str) else joined(content) for content in filled)
    return [part for content in filled for part in _as_parts(content)]


def text_of(message: Message) -> str:
    """The text of a message, without thoughts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return joined([part for part in content if part["type"] == "text"])


def _as_parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not isinstance(content, str):
        return content
    return [{"type": "text", "text": content}]
