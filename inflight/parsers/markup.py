"""How a family writes a call, to the character: what a grammar needs that makes a model write one, and what is looked for in
what its chat template renders.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inflight.errors import InvalidRequestError
from inflight.tokenizer.chat_template import ChatTemplate

_NAME = "get_probe"
_ARGUMENTS = {"a": 1}
_CALL_ID = "abcdefghi"  # Mistral's templates take no other length


@dataclass(frozen=True, slots=True)
class ToolMarkup:
    """A call is `before_name`, the name, `before_arguments`, the arguments as JSON, `end`.

    Attributes:
        parser: the name of the tool parser that reads it.
        trigger: what every call begins with: no other text may hold it, or begin with it where calls are `whole_message`.
        separator: what stands between two calls.
        is_list: calls are the items of one JSON list, behind the trigger and what `before_name` has before the bracket.
        whole_message: calls are the whole text, or there are none.
    """

    parser: str
    trigger: str
    before_name: str
    before_arguments: str
    end: str
    separator: str = ""
    is_list: bool = False
    whole_message: bool = False

    def begin(self, name: str) -> str:
        return f"{self.before_name}{name}{self.before_arguments}"

    @property
    def list_begin(self) -> str:
        """Of a list of calls: what stands before its bracket."""
        return self.before_name.partition("[{")[0]


MARKUPS = (
    ToolMarkup(
        "hermes", "<tool_call>", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", separator="\n"
    ),
    ToolMarkup("llama3_json", "{", '{"name": "', '", "parameters": ', "}", separator="; ", whole_message=True),
    ToolMarkup("mistral", "[TOOL_CALLS]", '[TOOL_CALLS] [{"name": "', '", "arguments": ', "", is_list=True),
    ToolMarkup("mistral", "[TOOL_CALLS]", '[TOOL_CALLS][{"name": "', '", "arguments": ', "", is_list=True),
    ToolMarkup("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", "[ARGS]", ""),
    ToolMarkup("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", "", ""),
)
# What shows that a template writes calls as a parser reads them, even where no markup above fits to the character.
_SIGNS = {
    "qwen3_coder": re.compile(f"<function={_NAME}>"),
    "hermes": re.compile(rf'<tool_call>\s*\{{\s*"(name": "{_NAME}"|arguments": )'),
    "mistral": re.compile(rf"\[TOOL_CALLS\]\s*(\[\{{|{_NAME})"),
}


def default_markup(parser: str) -> ToolMarkup | None:
    """The family's first; None for one whose arguments are no JSON."""
    return next((markup for markup in MARKUPS if markup.parser == parser), None)


def find_tool_markup(template: ChatTemplate) -> tuple[str | None, ToolMarkup | None]:
    """The parser and the markup of the calls that `template` writes, and the model has learned to write so.

    It is asked to render a call, with arguments as an object and as text: templates take one or both.
    """
    for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)):
        text = _render_call(template, arguments)
        for markup in MARKUPS:
            if f"{markup.begin(_NAME)}{json.dumps(_ARGUMENTS)}{markup.end}" in text:
                return markup.parser, markup
        for parser, sign in _SIGNS.items():
            if sign.search(text):
                return parser, None
    return None, None


def _render_call(template: ChatTemplate, arguments: Mapping[str, Any] | str) -> str:  # Any: JSON
    """A conversation with a call; "" if the template refuses it. Some want the call's result behind it."""
    function = {"name": _NAME, "arguments": arguments}
    turn = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": _CALL_ID, "function": function}],
    }
    result = {"role": "tool", "name": _NAME, "tool_call_id": _CALL_ID, "content": "1"}
    parameters = {"type": "object", "properties": {"a": {"type": "integer", "description": ""}}}
    tool = {"type": "function", "function": {"name": _NAME, "description": "", "parameters": parameters}}
    question: list[Mapping[str, Any]] = [{"role": "user", "content": "?"}]
    for messages in ([*question, turn], [*question, turn, result]):
        try:
            return template.render(messages, tools=[tool], add_generation_prompt=False)
        except InvalidRequestError:  # it refuses such a conversation
            continue
    return ""
