"""`WrittenAnswer`: what a whole answer says, put together from the events of its parser."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from inflight.interface.events import ContentDelta, Event, ReasoningDelta, ToolCallStart

ReasoningField = Literal["reasoning_content", "reasoning"]
# a choice of names -> the members of a message that have the reasoning
REASONING_FIELDS: Mapping[str, tuple[ReasoningField, ...]] = {
    "reasoning_content": ("reasoning_content",),
    "reasoning": ("reasoning",),
    "both": ("reasoning_content", "reasoning"),
}


@dataclass(slots=True)
class WrittenCall:
    """A tool call. `arguments` is the text that the model has written, usually a JSON object."""

    id: str
    name: str
    arguments: str = ""

    def as_function(self) -> dict[str, str]:
        return {"name": self.name, "arguments": self.arguments}


@dataclass(slots=True)
class WrittenAnswer:
    content: str = ""
    reasoning: str = ""
    calls: list[WrittenCall] = field(default_factory=list)

    def as_message(
        self, reasoning_fields: Iterable[ReasoningField] = ("reasoning_content",), *, has_older_calls: bool = False
    ) -> dict[str, Any]:  # Any: JSON
        """The message of the assistant, in OpenAI's form.

        Args:
            reasoning_fields: the members that have the reasoning, if there is some; empty to leave it out.
            has_older_calls: whether a call is the function_call of OpenAI's older API, which has one call in an answer.
        """
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message |= dict.fromkeys(reasoning_fields, self.reasoning)
        if not self.calls:
            return message
        if has_older_calls:
            message["function_call"] = self.calls[0].as_function()
        else:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": call.as_function()} for call in self.calls
            ]
        return message


def written_answer(events: Iterable[Event]) -> WrittenAnswer:
    """Put together the events of one answer, in their order."""
    answer = WrittenAnswer()
    for event in events:
        if isinstance(event, ContentDelta):
            answer.content += event.text
        elif isinstance(event, ReasoningDelta):
            answer.reasoning += event.text
        elif isinstance(event, ToolCallStart):
            answer.calls.append(WrittenCall(event.id, event.name))
        else:
            answer.calls[event.index].arguments += event.text
    return answer
