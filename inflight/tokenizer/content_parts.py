"""In which form a chat template reads the content of messages: as one text, or as a list of parts.

Most templates need one text; they would write a list as Python text into the prompt. Some loop over the parts, often only in
messages of some roles. Some also write the thoughts of a message from parts of the type "thinking".
"""

from collections.abc import Sequence

from inflight.tokenizer.probes import QUESTION, Message, Render, a_call, a_result, a_tool, first_rendered

THINKING = "thinking"
_FIRST, _SECOND = "probe text one", "probe text two"


def takes_parts(render: Render, role: str) -> bool | None:
    """Whether a template writes the texts of a list of parts in a message of `role`. None if the template writes no content of
    such a message, so that it cannot be found out."""
    parts = [_text(_FIRST), _text(_SECOND)]
    if _is_written(_render(render, role, parts)):
        return True
    if _is_written(_render(render, role, f"{_FIRST}\n{_SECOND}")):
        return False
    return None


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
    tools: list[Message] = []
    conversations: list[list[Message]] = [[QUESTION, message], [QUESTION, message, QUESTION]]
    if role == "user":
        conversations = [[message]]
    elif role == "system":
        conversations = [[message, QUESTION]]
    elif role == "tool":
        conversations = [[QUESTION, a_call({"a": 1}), a_result(content)]]
        tools = [a_tool("a")]
    return first_rendered(render, conversations, tools)
