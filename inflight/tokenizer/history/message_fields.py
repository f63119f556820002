"""`MessageFields`: each message has the fields that the template reads, in the form in which it reads them."""

import json
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

from inflight.tokenizer.call_arguments import (
    called_with_objects,
    need_text,
    parse_object,
    readable_part,
    takes_cut_text,
)
from inflight.tokenizer.content_parts import joined, needs_parts, refuses_empty, takes_parts, text_part
from inflight.tokenizer.history.absent_content import AbsentContent
from inflight.tokenizer.history.calls import calls_of, has_calls, has_function
from inflight.tokenizer.history.ids_and_names import IdsAndNames
from inflight.tokenizer.history.thoughts import Thoughts
from inflight.tokenizer.image_parts import ImageParts
from inflight.tokenizer.probes import Conversation, Message, PerRole, TemplateProbe


class MessageFields:
    """
    Attributes:
        images: how the template writes images.
    """

    def __init__(self, probe: TemplateProbe, images: ImageParts, *, loops: bool) -> None:
        """`loops`: whether the template has a loop over a message's content. It counts where nothing else is found out."""
        self._probe = probe
        self.images = images
        self._loops = loops
        self._takes_parts = PerRole(self._find_parts)
        self._needs_parts = PerRole(partial(needs_parts, probe.render))
        self._refuses_empty = PerRole(partial(refuses_empty, probe.render))
        self._thoughts = Thoughts(probe)
        self._absent_content = AbsentContent(probe)
        self._ids_and_names = IdsAndNames(probe)

    def complete(self, conversation: Sequence[Message]) -> Conversation:
        found = []
        for given in conversation:
            message = self.images.complete(self._thoughts.complete({**given}))
            content = message.get("content")
            if isinstance(content, list) and not self.takes_parts(message["role"]) and _is_text(content):
                message["content"] = joined(content)
            if calls_of(message):
                message["tool_calls"] = [
                    _complete_call(call) if has_function(call) else call for call in message["tool_calls"]
                ]
            message = self._absent_content.complete(message)
            content = message.get("content")
            if isinstance(content, str) and self.needs_parts(message["role"], is_empty=not content):
                message = {**message, "content": [text_part(content)]}
            found.append(message)
        if has_calls(found):
            self._ids_and_names.complete(found)
            self._complete_arguments(found)
        return found

    def takes_parts(self, role: str) -> bool:
        """Whether the template writes the parts of a list in messages of this role."""
        return self._takes_parts(role)

    def needs_parts(self, role: str, *, is_empty: bool) -> bool:
        """Whether the template writes the text of messages of this role only if it is a part. An empty text stays one, if the
        template does not refuse it."""
        return self._needs_parts(role) and (not is_empty or self._refuses_empty(role))

    def _find_parts(self, role: str) -> bool:
        written = takes_parts(self._probe.render, role)
        return self._loops if written is None else written

    @cached_property
    def needs_argument_text(self) -> bool:
        """Whether the arguments of calls must be text."""
        return need_text(self._probe.render)

    @cached_property
    def takes_cut_text(self) -> bool:
        """Whether the template writes text that is no JSON object as it is."""
        return takes_cut_text(self._probe.render)

    def _complete_arguments(self, conversation: Conversation) -> None:
        for message in conversation:
            for call in calls_of(message):
                function = call["function"]
                function["arguments"] = self._read(function.get("arguments"))
        if self.needs_argument_text and (functions := called_with_objects(conversation)):
            for function in functions:
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)

    def _read(self, arguments: object) -> object:
        """An object instead of the text of one. Of text that is no object, the part that can be read, where the template would
        write the text as a quoted string."""
        if not arguments:
            return {}
        if not isinstance(arguments, str):
            return arguments
        found = parse_object(arguments)
        if found is None and not self.takes_cut_text:
            found = readable_part(arguments)
        return arguments if found is None else found


def _complete_call(call: Message) -> dict[str, Any]:
    """A copy of a call. Some clients leave its type out, and some templates read it."""
    return {**call, "type": call.get("type") or "function", "function": {**call["function"]}}


def _is_text(parts: Sequence[Message]) -> bool:
    return all(part["type"] == "text" for part in parts)
