"""System messages that are not at the beginning of a conversation. Some templates refuse them, leave them out or move them."""

from collections.abc import Sequence
from typing import Any

from inflight.tokenizer.content_parts import joined
from inflight.tokenizer.probes import QUESTION, Message, Render, first_rendered

_ASKED, _LATE = "probe of a question", "probe of a late system message"


def takes_late_system(render: Render) -> bool:
    """Whether a template writes a system message at its place behind a message of the user."""
    first, late = ({"role": "system", "content": text} for text in ("!", _LATE))
    asked, answer = {"role": "user", "content": _ASKED}, {"role": "assistant", "content": "!"}
    prompt = first_rendered(render, [[first, asked, late, answer, QUESTION]], [])
    return 0 <= prompt.find(_ASKED) < prompt.find(_LATE)


def has_late_system(conversation: Sequence[Message]) -> bool:
    return any(message["role"] == "system" for message in conversation[1:])


def without_late_system(conversation: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:  # Any: JSON
    """The conversation with one system message at most, the first message. A system message right behind it becomes a part of
    it. A later one becomes a message of the user at its place, so that the prompt before it does not change. It becomes one
    message with the user's messages beside it, because some templates refuse two in a row."""
    found: list[dict[str, Any]] = []
    is_behind_late = False
    for message in conversation:
        before = found[-1] if found else {"role": ""}
        is_late = message["role"] == "system" and bool(found)
        role = "user" if is_late and before["role"] != "system" else message["role"]
        if before["role"] == role and (is_late or (is_behind_late and role == "user")):
            before["content"] = f"{_text(before)}\n\n{_text(message)}"
        else:
            found.append({**message, "role": role})
        is_behind_late = is_late
    return found


def _text(message: Message) -> str:
    content = message["content"]
    return content if isinstance(content, str) else joined(content)
