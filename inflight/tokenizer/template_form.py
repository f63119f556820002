"""`TemplateForm`: brings a conversation into the form that a chat template can write.

Templates differ in what they accept: which roles may follow each other, system messages, several calls in one message, text
parts or a string, null or "" for an answer without text, ids of one length, names of tool results. Clients differ in what they
send. Each property of the template is found by rendering invented conversations, when a conversation needs it for the first
time.

Calls in other forms become `tool_calls` first (`as_tool_calls`). Then the rules are used in this order, because each relies on
those before it:

1. `OtherRoles`: the others see no role that the template does not write.
2. `WrittenCalls`: calls and results become text, if the template has neither.
3. `SystemMessages`: the others see no system message that the template would not write.
4. `ResultOrder`, `SingleCalls`, `TextBesideCalls`: each turn with calls is one that the template takes.
5. `Neighbours`: messages that may not follow each other are joined, or get an empty message between them.
6. `MessageFields`: each message has the fields that the template reads. Invented conversations get them, too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from inflight.tokenizer.history.message_fields import MessageFields
from inflight.tokenizer.history.neighbours import Neighbours
from inflight.tokenizer.history.other_calls import as_tool_calls
from inflight.tokenizer.history.other_roles import OtherRoles
from inflight.tokenizer.history.system_messages import SystemMessages
from inflight.tokenizer.history.tool_fields import ToolFields
from inflight.tokenizer.history.tool_turns import ResultOrder, SingleCalls, TextBesideCalls
from inflight.tokenizer.history.written_calls import WrittenCalls
from inflight.tokenizer.image_parts import ImageParts, image_numbers
from inflight.tokenizer.probes import Conversation, Render, TemplateProbe


class TemplateForm:
    """Of one template. `render` raises an `InvalidRequestError` if the template refuses the messages.

    Attributes:
        images: how the template writes images.
    """

    def __init__(self, render: Render, *, loops: bool, image_token: str = "") -> None:
        """
        Args:
            loops: whether the template has a loop over a message's content. It counts where nothing else is found out.
            image_token: the model's token for an image, as text; "" if it has none.
        """
        self.images = ImageParts(render, image_token)
        # Probes are completed by the rules that look at one message only.
        self._fields = MessageFields(TemplateProbe(render), self.images, loops=loops)
        probe = TemplateProbe(render, self._fields.complete)
        self._other_roles = OtherRoles(probe)
        self._written_calls = WrittenCalls(probe)
        self._system_messages = SystemMessages(probe)
        self._neighbours = Neighbours(probe, self._written_calls.arrange)
        self._result_order = ResultOrder(probe, self._neighbours)
        self._single_calls = SingleCalls(probe)
        self._text_beside_calls = TextBesideCalls(probe)
        self._tool_fields = ToolFields(probe)

    def prepare_tools(self, tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
        """Returns checked tools with the fields that the template needs; None if there are none."""
        return self._tool_fields.complete(tools) if tools else None

    def prepare(self, conversation: Conversation, *, continues: bool = False) -> tuple[Conversation, list[int]]:
        """Returns checked messages in the form that the template can write, and the numbers of their images in the order in
        which it writes them. `continues`: the model goes on with the last message."""
        found = [
            {**message, "role": "system"} if message["role"] == "developer" else message
            for message in as_tool_calls(conversation)
        ]
        found = self._other_roles.arrange(found)
        found = self._written_calls.arrange(found)
        found = self._system_messages.arrange(found)
        if any(message.get("tool_calls") or message["role"] == "tool" for message in found):
            found = self._result_order.arrange(found)
            found = self._single_calls.arrange(found)
            found = self._text_beside_calls.arrange(found)
        found = self._neighbours.arrange(found, ends=not continues)
        return self._fields.complete(found), image_numbers(found)
