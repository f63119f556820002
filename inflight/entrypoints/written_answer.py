"""`WrittenAnswer`: what a whole answer says, put together from the events of its parser."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from inflight.interface.events import ContentDelta, Event, ReasoningDelta, ToolCallStart


@dataclass(slots=True)
class WrittenCall:
    """A tool call. `arguments` is the text that the model has written, usually a JSON object."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class WrittenAnswer:
    content: str = ""
    reasoning: str = ""
    calls: list[WrittenCall] = field(default_factory=list)


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
