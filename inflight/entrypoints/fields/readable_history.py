"""`make_readable`: leaves out of a chat's messages what the model cannot read, so that it does not end the conversation."""

from collections.abc import Iterator, Sequence

from inflight.entrypoints.fields.content_parts import readable_parts, text_instead
from inflight.entrypoints.fields.field_error import FieldError
from inflight.entrypoints.fields.images import OtherPart, RequestImages
from inflight.entrypoints.fields.messages import ChatMessage, OtherCall
from inflight.tokenizer.messages import RESULT_ROLES

_MAY_BE_EMPTY = ("assistant", *RESULT_ROLES)  # roles of messages that may have no content


def make_readable(messages: Sequence[ChatMessage], images: RequestImages) -> tuple[list[ChatMessage], list[str]]:
    """Returns those messages that the model can read, and the names of what is left out, for the header of the answer. The
    messages are changed: they have only parts and calls that the model can read. `images` gets the images.

    Raises:
        FieldError: the client asks about a medium, or a message has no content.
    """
    left_out: list[str] = []
    num_answered = max((i + 1 for i, message in enumerate(messages) if message.role == "assistant"), default=0)
    calls_left_out = frozenset(_calls_left_out(messages))
    found: list[ChatMessage] = []
    for i, message in enumerate(messages):
        if message.role in RESULT_ROLES and message.tool_call_id in calls_left_out:
            left_out.append(f"messages[] ({message.role})")
            continue
        if isinstance(message.content, list) and any(isinstance(part, OtherPart) for part in message.content):
            is_asked = i >= num_answered and message.role not in RESULT_ROLES
            parts = readable_parts(message.content, f"messages[{i}].content", left_out, images, is_asked=is_asked)
            message.content = parts or ""
        if message.tool_calls:
            left_out += [f"messages[].tool_calls[] ({call.type})" for call in message.tool_calls if _is_other(call)]
            message.tool_calls = [call for call in message.tool_calls if not _is_other(call)]
        if not message.content and not message.tool_calls and message.function_call is None:
            _use_other_text(message, left_out, images)
        if message.content is None and message.role not in _MAY_BE_EMPTY:
            raise FieldError(f"messages[{i}]", f"messages[{i}] (role {message.role!r}) has no content: add some")
        found.append(message)
    return found, left_out


def _use_other_text(message: ChatMessage, left_out: list[str], images: RequestImages) -> None:
    """The content of a message that has none is its refusal, or the transcript of its sound."""
    if message.refusal:
        message.content = message.refusal
    elif message.audio is not None:
        transcript = message.audio.get("transcript")
        message.content = transcript if isinstance(transcript, str) else text_instead("audio", images)
        left_out.append("messages[].audio")


def _calls_left_out(messages: Sequence[ChatMessage]) -> Iterator[str]:
    """The ids of the calls that the model does not see, so that their results are left out, too."""
    calls = [call for message in messages for call in message.tool_calls or ()]
    kept = {call.id for call in calls if not _is_other(call)}
    return (call.id for call in calls if _is_other(call) and isinstance(call.id, str) and call.id not in kept)


def _is_other(call: object) -> bool:
    return isinstance(call, OtherCall)
