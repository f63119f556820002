"""In which form a chat template reads the content of messages: as one text, or as a list of parts.

Most templates need one text; they would write a list as Python text into the prompt. Some loop over the parts, often only in
messages of some roles. Some also write the thoughts of a message from parts of the type "thinking".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inflight.errors import InvalidRequestError

THINKING = "thinking"
_CALL_ID = "abcdefghi"  # Mistral's templates accept only ids of this length
_FIRST, _SECOND = "probe text one", "probe text two"
_QUESTION = {"role": "user", "content": "?"}

Message = Mapping[str, Any]  # Any: JSON
Render = Callable[[Sequence[Message], Sequence[Message]], str]  # messages, tools -> prompt


def takes_parts(render: Render, role: str) -> bool | None:
    """Whether a template writes the texts of a list of parts in a message of `role`. None if the template writes no content of
    such a message, so that it cannot be found out.

    `render` raises an `InvalidRequestError` if the template refuses the messages.
    """
    parts = [_text(_FIRST), _text(_SECOND)]
    if _is_written(_render(render, role, parts)):
        return True
    return False if _is_written(_render(render, role, f"{_FIRST}\n{_SECOND}")) else None


def takes_thoughts(render: Render) -> bool:
    """Whether a template writes a part of the type "thinking" of an assistant's message."""
    return _is_written(_render(render, "assistant", [{"type": THINKING, THINKING: _FIRST}, _text(_SECOND)]))


def joined(parts: Sequence[Message]) -> str:
    return "\n".join(part["text"] for part in parts)


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _is_written(prompt: str) -> bool:
    """Whether both texts are in the prompt, but not as an object of Python or JSON."""
    is_object = any(
        f"{quote}type{quote}: {quote}{kind}{quote}" in prompt for quote in "'\"" for kind in ("text", THINKING)
    )
    return _FIRST in prompt and _SECOND in prompt and not is_object


def _render(render: Render, role: str, content: object) -> str:
    """Renders a short conversation with this message; "" if the template refuses it."""
    message = {"role": role, "content": content}
    conversations: list[tuple[list[Message], list[Message]]] = [
        ([_QUESTION, message], []),
        ([_QUESTION, message, _QUESTION], []),
    ]
    if role == "user":
        conversations = [([message], [])]
    elif role == "system":
        conversations = [([message, _QUESTION], [])]
    elif role == "tool":
        function = {"name": "probe", "arguments": {"a": 1}}
        call = {"type": "function", "id": _CALL_ID, "function": function}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {**message, "name": "probe", "tool_call_id": _CALL_ID}
        parameters = {"type": "object", "properties": {"a": {"type": "integer", "description": ""}}}
        tool = {"type": "function", "function": {"name": "probe", "description": "", "parameters": parameters}}
        conversations = [([_QUESTION, turn, result], [tool])]
    for messages, tools in conversations:
        try:
            return render(messages, tools)
        except InvalidRequestError:
            continue
    return ""
