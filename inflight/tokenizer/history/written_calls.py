"""Calls as text, for templates that write no calls.

Some of these models know a form of calls all the same: their templates expect that the program has left it in the answer's
text. Then the template writes a sign of the form beside the list of tools. Others show no tools, so the form is free.
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

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
        signs = _FORMS if NAME in prompt else {}
        return next((form for sign, form in signs.items() if re.search(sign, prompt)), _as_lines)

    def arrange(self, conversation: Conversation) -> Conversation:
        if not has_calls(conversation) or self.takes_calls:
            return conversation
        names = {id(result): call["function"].get("name") for result, call in matched(conversation) if call is not None}
        found = []
        for message in conversation:
            if calls := calls_of(message):
                text = self._form(calls)
                made = {key: value for key, value in message.items() if key != "tool_calls"}
                found.append({**made, "content": join_contents(message.get("content"), text)})
            elif message["role"] == "tool" and not self.takes_results:
                found.append(result_as_question({"name": names.get(id(message)), **message}))
            else:
                found.append(message)
        return found


def _as_hermes(calls: list[dict[str, Any]]) -> str:  # Any: JSON
    objects = [{"name": call["function"].get("name"), "arguments": _arguments(call)} for call in calls]
    return "\n".join(f"<tool_call>\n{json.dumps(each, ensure_ascii=False)}\n</tool_call>" for each in objects)


def _as_lfm2(calls: list[dict[str, Any]]) -> str:
    written = ", ".join(_as_python(call["function"].get("name"), _arguments(call)) for call in calls)
    return f"<|tool_call_start|>[{written}]<|tool_call_end|>"


def _as_python(name: object, arguments: object) -> str:
    given = arguments if isinstance(arguments, Mapping) else {}
    return f"{name}({', '.join(f'{key}={_literal(value)}' for key, value in given.items())})"


def _literal(value: object) -> str:
    """A value as Python writes it, with double quotes around texts."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_literal(key)}: {_literal(each)}' for key, each in value.items())}}}"
    return repr(value)


def _as_lines(calls: list[dict[str, Any]]) -> str:
    return "\n".join(
        f"Tool call: {call['function'].get('name')}({json.dumps(_arguments(call), ensure_ascii=False)})"
        for call in calls
    )


def _arguments(call: Mapping[str, Any]) -> Any:
    """As an object where they are text of one."""
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


# a sign beside the list of tools -> how the calls of one message are written
_FORMS: Mapping[str, Callable[[list[dict[str, Any]]], str]] = {
    r"<\|tool_list_start\|>": _as_lfm2,
    r"<tool_call>\s*\{\s*[\"']name[\"']:.{1,80}[\"']arguments[\"']:.{1,80}\s*</tool_call>": _as_hermes,
}
