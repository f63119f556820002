"""Calls as text, for templates that write no calls.

Some of these models still have a form of calls: their templates expect that the program has left the calls in the text of the
answer. Such a template describes the form beside the list of tools. Other templates show no tools, so any form will do.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

from inflight.tokenizer.history.call_forms import CALL_SIGNS, FORMS, as_lines
from inflight.tokenizer.history.calls import calls_of, has_calls, matched, result_as_question
from inflight.tokenizer.history.joining import join_contents
from inflight.tokenizer.probes import ARGUMENT, NAME, QUESTION, Conversation, TemplateProbe, a_tool, invented


class WrittenCalls:
    def __init__(self, probe: TemplateProbe) -> None:
        self._probe = probe

    @cached_property
    def takes_calls(self) -> bool:
        """Whether the template writes a call: with or without a result, with or without tools."""
        return any(
            texts[1] in self._probe.prompt(conversation, tools)
            for conversation, texts in map(invented, ("uc", "ucr", "ucrau"))
            for tools in ((), (a_tool(ARGUMENT),))
        )

    @cached_property
    def takes_results(self) -> bool:
        """Whether the template writes the result of a call, if the call itself is written as text."""
        return self._probe.takes("uarau") or self._probe.takes("uar")

    @cached_property
    def _form(self) -> Callable[[list[dict[str, Any]]], str]:
        """How calls are written. A template that does not show the tool shows no form of its calls."""
        prompt = self._probe.prompt([QUESTION], [a_tool(ARGUMENT)])
        names = FORMS if NAME in prompt else ()
        return next((FORMS[name] for name in names if CALL_SIGNS[name].search(prompt)), as_lines)

    def arrange(self, conversation: Conversation) -> Conversation:
        if not has_calls(conversation) or self.takes_calls:
            return conversation
        names = {id(result): call["function"].get("name") for result, call in matched(conversation) if call is not None}
        found = []
        for message in conversation:
            if calls := calls_of(message):
                text = self._form(calls)
                made = {key: value for key, value in message.items() if key != "tool_calls"}
                found.append({**made, "content": join_contents([message.get("content"), text])})
            elif message["role"] == "tool" and not self.takes_results:
                found.append(result_as_question({"name": names.get(id(message)), **message}))
            else:
                found.append(message)
        return found
