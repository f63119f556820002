"""`TemplateForm`: the form of messages that a chat template can write, found by rendering invented conversations.

Templates differ in what they accept: text parts or a string, null or "" for an answer without text, call ids of one length,
names of tool results, system messages at any place. Clients differ in what they send. Each property is found when a
conversation needs it for the first time.
"""

import hashlib
import json
import re
import string
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from inflight.tokenizer.call_arguments import called_with_objects, need_text
from inflight.tokenizer.content_parts import THINKING, joined, takes_parts, takes_thoughts
from inflight.tokenizer.messages import set_reasoning
from inflight.tokenizer.probes import CALL_ID, NAME, QUESTION, Message, Render, a_call, a_result, a_tool, first_rendered
from inflight.tokenizer.system_messages import has_late_system, takes_late_system, without_late_system

_LONG_ID = "call_0123456789abcdef01234567"
_SHORT_IDS = re.compile(r"[A-Za-z0-9]{9}")
_ID_CHARACTERS = string.ascii_letters + string.digits


class TemplateForm:
    """Of one template. `render` raises an `InvalidRequestError` if the template refuses the messages."""

    def __init__(self, render: Render, *, loops: bool) -> None:
        """`loops`: whether the template has a loop over a message's content. It counts where nothing else is found out."""
        self._render = render
        self._loops = loops
        self._takes_parts: dict[str, bool] = {}  # by role

    def prepare(self, conversation: list[dict[str, Any]]) -> None:
        """Bring checked messages, in place, into the form that the template can write."""
        if has_late_system(conversation) and not self.takes_late_system:
            conversation[:] = without_late_system(conversation)
        calls: dict[str, str] = {}  # id -> name of the called function
        for message in conversation:
            if message["role"] == "assistant" and message.get("content") is None:
                message.pop("content", None)
                message |= self.missing_content if "tool_calls" in message else {"content": ""}
            if isinstance(message.get("content"), list):
                self._prepare_parts(message)
            for call in message.get("tool_calls") or ():
                if isinstance(call, dict) and isinstance(function := call.get("function"), dict):
                    if function.get("arguments") is None:
                        function["arguments"] = {}
                    calls[str(call.get("id"))] = str(function.get("name"))
            if message["role"] == "tool" and "name" not in message and self.needs_names:
                message["name"] = calls.get(str(message.get("tool_call_id")), next(reversed(calls.values()), ""))
        if calls:
            self._prepare_ids(conversation)
            if self.needs_argument_text and (functions := called_with_objects(conversation)):
                for function in functions:
                    function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)

    # -- what the template can write -----------------------------------------------------------------------------------

    @cached_property
    def needs_argument_text(self) -> bool:
        """Whether the arguments of calls must be text."""
        return need_text(self._render)

    @cached_property
    def missing_content(self) -> Mapping[str, str | None]:
        """What is added to a message with calls and without content. Null is best, as in the data that models learn from. But
        many templates write it as "None" or refuse it; most of these take "", and some nothing at all."""
        as_text = self._render_turn(a_call() | {"content": ""})
        as_null = self._render_turn(a_call() | {"content": None})
        if as_null and as_null.count("None") <= as_text.count("None") and (NAME in as_null or NAME not in as_text):
            return {"content": None}
        return {"content": ""} if as_text else {}

    @cached_property
    def takes_thoughts(self) -> bool:
        """Whether the template writes parts of the type "thinking"."""
        return takes_thoughts(self._render)

    @cached_property
    def takes_late_system(self) -> bool:
        """Whether the template writes a system message at its place if it is not the first message."""
        return takes_late_system(self._render)

    def takes_parts(self, role: str) -> bool:
        """Whether the template writes the parts of a list in messages of this role."""
        if role not in self._takes_parts:
            found = takes_parts(self._render, role)
            self._takes_parts[role] = self._loops if found is None else found
        return self._takes_parts[role]

    @cached_property
    def needs_short_ids(self) -> bool:
        """Whether ids of calls must be 9 letters and digits (Mistral)."""
        return not self._render_turn(a_call(call_id=_LONG_ID), _LONG_ID) and bool(self._render_turn(a_call()))

    @cached_property
    def needs_ids(self) -> bool:
        return not self._render_turn(a_call(call_id=None), None) and bool(self._render_turn(a_call()))

    @cached_property
    def needs_names(self) -> bool:
        """Whether a tool result must have the name of the tool."""
        nameless = a_result()
        del nameless["name"]
        return not self._try([QUESTION, a_call(), nameless]) and bool(self._try([QUESTION, a_call(), a_result()]))

    def _render_turn(self, turn: Message, call_id: str | None = CALL_ID) -> str:
        """A call and its result; if the template refuses it also with the usual id, the call alone."""
        messages = [QUESTION, turn, a_result(call_id=call_id)]
        if text := self._try(messages):
            return text
        return "" if self._try([QUESTION, a_call(), a_result()]) else self._try(messages[:-1])

    def _try(self, conversation: Sequence[Message]) -> str:
        """The prompt of the conversation; "" if the template refuses it."""
        return first_rendered(self._render, [conversation], [a_tool()])

    # -- preparing -----------------------------------------------------------------------------------------------------

    def _prepare_parts(self, message: dict[str, Any]) -> None:
        """Makes one text of the parts, if the template does not read lists in messages of this role. Makes a field of thoughts,
        if the template does not read them as parts."""
        content = message["content"]
        if any(part["type"] == THINKING for part in content):
            if self.takes_thoughts:
                return
            if "reasoning_content" not in message:
                set_reasoning(message, "".join(part[THINKING] for part in content if part["type"] == THINKING))
            message["content"] = content = [part for part in content if part["type"] != THINKING]
        if not self.takes_parts(message["role"]):
            message["content"] = joined(content)

    def _prepare_ids(self, conversation: list[dict[str, Any]]) -> None:
        calls = [call for message in conversation for call in message.get("tool_calls") or () if isinstance(call, dict)]
        results = [message for message in conversation if message["role"] == "tool"]
        holders = [*((call, "id") for call in calls), *((result, "tool_call_id") for result in results)]
        if any(holder.get(key) is None for holder, key in holders) and (self.needs_ids or self.needs_short_ids):
            for number, call in enumerate(calls):
                call.setdefault("id", f"{number:09d}")
            for result, call in zip(results, calls, strict=False):
                result.setdefault("tool_call_id", call["id"])
        given = [holder[key] for holder, key in holders if isinstance(holder.get(key), str)]
        if not all(map(_SHORT_IDS.fullmatch, given)) and self.needs_short_ids:
            for holder, key in holders:
                if isinstance(value := holder.get(key), str):
                    holder[key] = short_id(value)


def short_id(call_id: str) -> str:
    """9 letters and digits. The same for the same id, and the id itself if it has this form."""
    if _SHORT_IDS.fullmatch(call_id):
        return call_id
    digest = hashlib.blake2b(call_id.encode("utf-8", "replace"), digest_size=9).digest()
    return "".join(_ID_CHARACTERS[byte % len(_ID_CHARACTERS)] for byte in digest)
