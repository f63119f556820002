"""Two messages of one role become one."""

from typing import Any

from inflight.tokenizer.content_parts import joined
from inflight.tokenizer.messages import set_reasoning
from inflight.tokenizer.probes import Message

Content = str | list[dict[str, Any]] | None  # Any: JSON


def join(first: Message, second: Message) -> dict[str, Any]:
    """One message with the texts, the thoughts and the calls of both. It has the role of the first."""
    made = {**second, **first, "content": join_contents(first.get("content"), second.get("content"))}
    thoughts = [message["reasoning_content"] for message in (first, second) if "reasoning_content" in message]
    if len(thoughts) == 2:
        for name in ("thinking", "reasoning_content", "reasoning"):
            made.pop(name, None)
        set_reasoning(made, "\n\n".join(filter(None, thoughts)))
    calls = [*(first.get("tool_calls") or ()), *(second.get("tool_calls") or ())]
    if calls:
        made["tool_calls"] = calls
    if made["content"] is None:
        del made["content"]
    return made


def join_contents(first: Content, second: Content) -> Content:
    """One text, with an empty line between the two. If there is a thought among the parts, it is a list of parts."""
    if not first or not second:
        return first or second or (first if second is None else second)
    if _is_text(first) and _is_text(second):
        return f"{_as_text(first)}\n\n{_as_text(second)}"
    return [*_as_parts(first), *_as_parts(second)]


def text_of(message: Message) -> str:
    """The text of a message, without thoughts."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else joined([part for part in content if part["type"] == "text"])


def _is_text(content: str | list[dict[str, Any]]) -> bool:
    return isinstance(content, str) or all(part["type"] == "text" for part in content)


def _as_text(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else joined(content)


def _as_parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
