"""The messages that `LLM.chat` gets: makes a list of conversations, or says what is wrong."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from inflight.engine.request.prompt import as_list
from inflight.entrypoints.llm_arguments import advice
from inflight.errors import InvalidRequestError

Message = Mapping[str, Any]  # Any: JSON, checked by the chat template


def as_conversations(given: object) -> list[Sequence[Message]]:
    """Make a list of conversations. Messages in a list are one conversation."""
    if isinstance(given, str):
        raise InvalidRequestError(
            f"messages is a text; give messages: chat([{{'role': 'user', 'content': {given[:50]!r}}}])", "messages"
        )
    if isinstance(given, Mapping):
        raise InvalidRequestError("messages is one message; give a list of messages: chat([message])", "messages")
    if (entries := as_list(given)) is None:
        raise InvalidRequestError(
            f"messages is a {type(given).__name__}, not a list of messages{advice(given)}", "messages"
        )
    if not entries:
        raise InvalidRequestError("messages is empty; give at least one message", "messages")
    if isinstance(entries[0], Mapping):
        return [cast("Sequence[Message]", entries)]
    conversations = [as_list(entry) for entry in entries]
    for index, (entry, conversation) in enumerate(zip(entries, conversations, strict=True)):
        if conversation is None:
            kind = "text" if isinstance(entry, str) else type(entry).__name__
            raise InvalidRequestError(
                f"messages[{index}] is a {kind}; give each conversation as a list of messages, such as "
                "[{'role': 'user', 'content': text}]",
                f"messages[{index}]",
            )
        if not conversation:
            raise InvalidRequestError(f"messages[{index}] is empty; give at least one message", f"messages[{index}]")
    return cast("list[Sequence[Message]]", conversations)
