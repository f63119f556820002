"""`ToolMarkup`: the exact text that a family of models writes around the name and the arguments of a tool call.

A grammar that makes a model write calls is built from this markup. To find the markup of a model, an invented call is rendered
with the model's chat template. Then each known markup is searched for in the rendered text.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inflight.errors import InvalidRequestError
from inflight.structured_output.spec import ArgumentTags
from inflight.tokenizer.chat_template import ChatTemplate
from inflight.tokenizer.probes import CALL_ID, QUESTION

_NAME = "get_probe"
_ARGUMENTS = {"a": 1}
_ANSWER = "probed answer"
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer", "description": ""}}}
_TOOL = {"type": "function", "function": {"name": _NAME, "description": "", "parameters": _PARAMETERS}}


@dataclass(frozen=True, slots=True)
class ToolMarkup:
    """A call is this text, in this order: `before_name`, the name, `before_arguments`, the arguments (JSON by default), `end`.

    Attributes:
        parser: the name of the tool parser that reads such calls.
        trigger: the beginning of every call. Text outside calls must not contain the trigger. But if `whole_message` is True, a
            text without calls may contain the trigger, and only must not begin with it.
        separator: the text between two calls.
        is_list: whether the calls are the items of one JSON list. If so, `before_name` contains the "[" of the list. The text
            of `before_name` before the "[" is written once, before the list.
        whole_message: whether a message has either calls or other text, not both.
        arguments: if given, each argument stands between these tags, and the arguments are not JSON.
        only_forced: whether a grammar can constrain calls only if the text must be a call. Other texts of the model have
            headers, which the grammar does not describe.
    """

    parser: str
    trigger: str
    before_name: str
    before_arguments: str
    end: str
    separator: str = ""
    is_list: bool = False
    whole_message: bool = False
    arguments: ArgumentTags | None = None
    only_forced: bool = False

    def begin(self, name: str) -> str:
        return f"{self.before_name}{name}{self.before_arguments}"

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:  # Any: JSON
        """A call as the model writes it. A list of calls is not closed."""
        written = json.dumps(arguments)
        if (tags := self.arguments) is not None:
            values = {
                key: value if isinstance(value, str) and not tags.is_json else json.dumps(value)
                for key, value in arguments.items()
            }
            pairs = [
                f"{tags.before_key}{key}{tags.after_key}{value}{tags.after_value}" for key, value in values.items()
            ]
            written = tags.between.join(pairs)
        return f"{self.begin(name)}{written}{self.end}"

    @property
    def list_begin(self) -> str:
        """The text before the "[" of a list of calls."""
        return self.before_name.partition("[{")[0]


_NAMED_ARGUMENTS = ArgumentTags("", "=", "", between=", ", is_json=True)  # as in Python
MARKUPS = (
    ToolMarkup(
        "hermes", "<tool_call>", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", separator="\n"
    ),
    ToolMarkup("llama3_json", "{", '{"name": "', '", "parameters": ', "}", separator="; ", whole_message=True),
    ToolMarkup("mistral", "[TOOL_CALLS]", '[TOOL_CALLS] [{"name": "', '", "arguments": ', "", is_list=True),
    ToolMarkup("mistral", "[TOOL_CALLS]", '[TOOL_CALLS][{"name": "', '", "arguments": ', "", is_list=True),
    ToolMarkup("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", "[ARGS]", ""),
    ToolMarkup("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", "", ""),
    ToolMarkup(
        "deepseek_v3",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n",
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    ToolMarkup(
        "deepseek_v31",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    *(
        ToolMarkup(
            name,
            f"<{tag}>",
            f"<{tag}>\n<function=",
            ">\n",
            f"</function>\n</{tag}>",
            separator="\n",
            arguments=ArgumentTags(
                "<parameter=",
                f">{blank}",
                f"{blank}</parameter>\n",
                ("<parameter=", "</parameter>", "</function>", f"</{tag}>"),
            ),
        )
        for name, tag, blank in (("qwen3_coder", "tool_call", "\n"), ("seed_oss", "seed:tool_call", ""))
    ),
    *(
        ToolMarkup(
            "glm45",
            "<tool_call>",
            "<tool_call>",
            blank,
            "</tool_call>",
            separator=blank,
            arguments=ArgumentTags(
                "<arg_key>",
                f"</arg_key>{blank}<arg_value>",
                f"</arg_value>{blank}",
                ("<arg_key>", "</arg_value>", "</tool_call>"),
            ),
        )
        for blank in ("\n", "")
    ),
    ToolMarkup(
        "minimax_m2",
        "<minimax:tool_call>",
        '<minimax:tool_call>\n<invoke name="',
        '">\n',
        "</invoke>\n</minimax:tool_call>",
        separator="\n",
        arguments=ArgumentTags(
            '<parameter name="',
            '">',
            "</parameter>\n",
            ("<parameter name=", "</parameter>", "</invoke>", "</minimax:tool_call>"),
        ),
    ),
    # the grammar writes the arguments as JSON, which the parser reads too
    ToolMarkup("gemma4", "<|tool_call>", "<|tool_call>call:", "", "<tool_call|>"),
    ToolMarkup(
        "openai",
        "<|channel|>commentary to=functions.",
        "<|channel|>commentary to=functions.",
        " <|constrain|>json<|message|>",
        "",
        only_forced=True,
    ),
    ToolMarkup(
        "lfm2", "<|tool_call_start|>", "<|tool_call_start|>[", "(", ")]<|tool_call_end|>", arguments=_NAMED_ARGUMENTS
    ),
    ToolMarkup("olmo3", "<function_calls>", "<function_calls>", "(", ")</function_calls>", arguments=_NAMED_ARGUMENTS),
    ToolMarkup("pythonic", "[", "[", "(", ")]", whole_message=True, arguments=_NAMED_ARGUMENTS),
    ToolMarkup("llama4_pythonic", "[", "[", "(", ")]", whole_message=True, arguments=_NAMED_ARGUMENTS),
)
# parser name -> pattern. If no markup above fits, but a rendered call matches, the parser can read the model's calls.
_SIGNS = {
    "qwen3_coder": re.compile(rf"<tool_call>\s*<function={_NAME}>"),
    "seed_oss": re.compile(rf"<seed:tool_call>\s*<function={_NAME}>"),
    "glm45": re.compile(rf"<tool_call>{_NAME}\s*<arg_key>"),
    "minimax_m2": re.compile(rf'<minimax:tool_call>\s*<invoke name="{_NAME}">'),
    "gemma4": re.compile(rf"<\|tool_call>call:{_NAME}\{{"),
    "openai": re.compile(rf"to=functions\.{_NAME}\b"),
    "deepseek_v3": re.compile(f"function<｜tool▁sep｜>{_NAME}"),
    "deepseek_v31": re.compile(f"<｜tool▁call▁begin｜>{_NAME}<｜tool▁sep｜>"),
    "hermes": re.compile(rf'<tool_call>\s*\{{\s*"(name": "{_NAME}"|arguments": )'),
    "mistral": re.compile(rf"\[TOOL_CALLS\]\s*(\[\{{|{_NAME})"),
    "lfm2": re.compile(rf"<\|tool_call_start\|>\s*\[?\s*{_NAME}\("),
    "olmo3": re.compile(rf"<function_calls>\s*\[?\s*{_NAME}\("),
    "llama4_pythonic": re.compile(rf"<\|python_start\|>\s*\[\s*{_NAME}\("),
}


# Signs in the text that tells the model how to write calls, of templates that write no calls themselves.
_INSTRUCTIONS = {
    "hermes": re.compile(r"<tool_call>\s*\{\s*[\"']name[\"']:.{1,80}[\"']arguments[\"']:.{1,80}\s*</tool_call>"),
    "lfm2": re.compile(r"<\|tool_list_start\|>|List of tools: \[\{"),
}


def default_markup(parser: str) -> ToolMarkup | None:
    """Returns the first markup of the parser's family; None if there is no such parser."""
    return next((markup for markup in MARKUPS if markup.parser == parser), None)


def find_tool_markup(template: ChatTemplate) -> tuple[str | None, ToolMarkup | None]:
    """Returns the name of the parser and the markup for the calls that `template` writes. Each may be None.

    An invented call is rendered with its arguments as a JSON object. If nothing fits, it is rendered with its arguments as JSON
    text. Some templates accept only one of these two forms. If the template writes no calls at all, its instructions about
    calls are read.
    """
    for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)):
        text = _render_call(template, arguments)
        for markup in MARKUPS:
            call = markup.call(_NAME, _ARGUMENTS)
            if call in text and not (markup.whole_message and _is_wrapped(template, text.partition(call)[0])):
                return markup.parser, markup
        for parser, sign in _SIGNS.items():
            if sign.search(text):
                similar = (each for each in MARKUPS if each.parser == parser and each.before_arguments in text)
                return parser, next(similar, default_markup(parser))
    more = {"xml_tools": [_TOOL]}  # SmolLM3's name of the tools
    instructions = render_or_nothing(template, [QUESTION], tools=[_TOOL], variables=more)
    found = next((parser for parser, sign in _INSTRUCTIONS.items() if sign.search(instructions)), None)
    return (None, None) if found is None else (found, default_markup(found))


def _is_wrapped(template: ChatTemplate, before: str) -> bool:
    """Whether the template writes more before a call than before an answer. `before`: the rendered text before the call."""
    answer = {"role": "assistant", "content": _ANSWER}
    text = render_or_nothing(template, [QUESTION, answer], tools=[_TOOL])
    return _ANSWER in text and text.partition(_ANSWER)[0].rstrip() != before.rstrip()


def _render_call(template: ChatTemplate, arguments: Mapping[str, Any] | str) -> str:  # Any: JSON
    """Render a conversation that ends with a call. If the template refuses it, the call's result is added, because
    some templates refuse a call without a result."""
    function = {"name": _NAME, "arguments": arguments}
    turn = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": CALL_ID, "function": function}],
    }
    result = {"role": "tool", "name": _NAME, "tool_call_id": CALL_ID, "content": "1"}
    conversations = ([QUESTION, turn], [QUESTION, turn, result])
    return next(filter(None, (render_or_nothing(template, each, tools=[_TOOL]) for each in conversations)), "")


def render_or_nothing(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],  # Any: JSON
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Returns the rendered messages; "" if the template refuses them. `variables`: further ones for the template."""
    try:
        return template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, chat_template_kwargs=variables
        )
    except InvalidRequestError:
        return ""
