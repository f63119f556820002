"""In which form a chat template reads the content of messages: as one text, or as a list of parts.

Most templates need one text; they would write a list as Python text into the prompt. Some loop over the parts, often only in
messages of some roles, and some of these write nothing of a text that is no list. Some also write the thoughts of a message
from parts of the type "thinking".
"""

from collections.abc import Sequence

from inflight.tokenizer.probes import QUESTION, Message, Render, a_call, a_result, a_tool, first_rendered

THINKING = "thinking"
FIRST, SECOND = "probe text one", "probe text two"


def takes_parts(render: Render, role: str) -> bool | None:
    """Whether a template writes the texts of a list of parts in a message of `role`. None if the template writes no content of
    such a message, so that it cannot be found out."""
    parts = [text_part(FIRST), text_part(SECOND)]
    if is_written(rendered_with(render, role, parts)):
        return True
    if _writes_text(render, role):
        return False
    return None


def needs_parts(render: Render, role: str) -> bool:
    """Whether a template writes a message of `role` only if its content is a list of parts."""
    return not _writes_text(render, role) and takes_parts(render, role) is True


def refuses_empty(render: Render, role: str) -> bool:
    """Whether a template refuses a message of `role` with an empty text."""
    return not rendered_with(render, role, "")


def _writes_text(render: Render, role: str) -> bool:
    return is_written(rendered_with(render, role, f"{FIRST}\n{SECOND}"))


def takes_thoughts(render: Render) -> bool:
    """Whether a template writes a part of the type "thinking" of an assistant's message."""
    return is_written(rendered_with(render, "assistant", [{"type": THINKING, THINKING: FIRST}, text_part(SECOND)]))


def joined(parts: Sequence[Message]) -> str:
    return "\n".join(part["text"] for part in parts)


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def is_written(prompt: str) -> bool:
    """Whether both texts are in the prompt, but not as an object of Python or JSON."""
    kinds = ("text", THINKING, "image", "image_url")
    is_object = any(f"{quote}type{quote}: {quote}{kind}{quote}" in prompt for quote in "'\"" for kind in kinds)
    return FIRST in prompt and SECOND in prompt and not is_object


def rendered_with(render: Render, role: str, content: object) -> str:
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
