"""`ToolMarkup`: the exact text that a family of models writes around the name and the arguments of a tool call.

A grammar that makes a model write calls is built from this markup. `MARKUPS` has the known ones, in the order in which they are
looked for in a chat template (`template_markup.py`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inflight.structured_output.spec import ArgumentTags


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
                f"{tags.before_key}{key}{tags.after_key}{value}{tags.after_value.replace('{key}', key)}"
                for key, value in values.items()
            ]
            written = tags.between.join(pairs)
        return f"{self.begin(name)}{written}{self.end}"

    @property
    def list_begin(self) -> str:
        """The text before the "[" of a list of calls."""
        return self.before_name.partition("[{")[0]


_MINIMAX = "]<]minimax[>["  # before each tag of MiniMax-M3
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
        for name, tag, blank in (
            ("qwen3_coder", "tool_call", "\n"),
            ("zaya_xml", "zyphra_tool_call", "\n"),
            ("seed_oss", "seed:tool_call", ""),
        )
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
    ToolMarkup("functiongemma", "<start_function_call>", "<start_function_call>call:", "", "<end_function_call>"),
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
    ToolMarkup(
        "minicpm3",
        "<|tool_call_start|>",
        "<|tool_call_start|>\n```python\n",
        "(",
        ")\n```\n<|tool_call_end|>",
        separator="\n",
        arguments=_NAMED_ARGUMENTS,
    ),
    # a JSON list of calls between tags; a grammar writes each call in a list of its own
    *(
        ToolMarkup(
            "jamba", "<tool_calls>", f'<tool_calls>{begin}{{"name": "', '", "arguments": ', f"}}{end}</tool_calls>"
        )
        for begin, end in (("[\n    ", "\n]"), ("[", "]"), ("\n", "\n"))
    ),
    ToolMarkup("nemotron_json", "<TOOLCALL>", '<TOOLCALL>[{"name": "', '", "arguments": ', "}]</TOOLCALL>"),
    ToolMarkup(
        "nemotron_mini", "<toolcall>", '<toolcall> {"name": "', '", "arguments": ', "} </toolcall>", separator=" "
    ),
    ToolMarkup("granite", "<|tool_call|>", '<|tool_call|>[{"name": "', '", "arguments": ', "}]"),
    ToolMarkup(
        "granite-20b-fc", "<function_call>", '<function_call> {"name": "', '", "arguments": ', "}", separator=" "
    ),
    ToolMarkup("phi4_mini_json", "functools[", 'functools[{"name": "', '", "arguments": ', "}]"),
    ToolMarkup(
        "internlm", "<|action_start|>", '<|action_start|><|plugin|>{"name": "', '", "parameters": ', "}<|action_end|>"
    ),
    ToolMarkup("gigachat3", "<|function_call|>", '<|function_call|>{"name": "', '", "arguments": ', "}"),
    ToolMarkup(
        "gigachat3", "function call", 'function call<|role_sep|>\n{"name": "', '", "arguments": ', "}", only_forced=True
    ),
    *(
        ToolMarkup(
            name,
            "<|START_ACTION|>",
            '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "',
            '", "parameters": ',
            "}\n]<|END_ACTION|>",
        )
        for name in ("cohere_command3", "cohere_command4")
    ),
    ToolMarkup(
        "command_r", "Action:", 'Action:\n```json\n[{"tool_name": "', '", "parameters": ', "}]\n```", separator="\n"
    ),
    ToolMarkup("apertus", "<|tools_prefix|>", '<|tools_prefix|>[{"', '": ', "}]<|tools_suffix|>"),
    ToolMarkup("xlam", "[", '[{"name": "', '", "arguments": ', "}]", whole_message=True, only_forced=True),
    ToolMarkup("llama4_json", "{", '{"name": "', '", "parameters": ', "}", separator="; ", whole_message=True),
    # the name before the arguments
    ToolMarkup(
        "kimi_k2",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
        ":0<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    ToolMarkup(
        "solar_open",
        "<|tool_calls|>",
        "<|tool_calls|><|tool_call:begin|>abcdefghij<|tool_call:name|>",
        "<|tool_call:args|>",
        "<|tool_call:end|>",
    ),
    # further values between tags
    *(
        ToolMarkup(
            name,
            f"<｜DSML｜{tag}>",
            f'<｜DSML｜{tag}>\n<｜DSML｜invoke name="',
            '">\n',
            f"</｜DSML｜invoke>\n</｜DSML｜{tag}>",
            separator="\n",
            arguments=ArgumentTags(
                '<｜DSML｜parameter name="', '">', "</｜DSML｜parameter>\n", ("<｜DSML｜", "</｜DSML｜")
            ),
        )
        for name, tag in (("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls"))
    ),
    ToolMarkup(
        "minicpm5",
        '<function name="',
        '<function name="',
        '">',
        "</function>",
        arguments=ArgumentTags(
            '<param name="', '">', "</param>", ("<param name=", "</param>", "</function>", "<![CDATA[")
        ),
    ),
    ToolMarkup(
        "hy_v3",
        "<tool_calls:opensource>",
        "<tool_calls:opensource>\n<tool_call:opensource>",
        "<tool_sep:opensource>\n",
        "</tool_call:opensource>\n</tool_calls:opensource>",
        separator="\n",
        arguments=ArgumentTags(
            "<arg_key:opensource>",
            "</arg_key:opensource>\n<arg_value:opensource>",
            "</arg_value:opensource>\n",
            ("<arg_key:opensource>", "</arg_value:opensource>", "</tool_call:opensource>"),
        ),
    ),
    ToolMarkup(
        "longcat",
        "<longcat_tool_call>",
        "<longcat_tool_call>",
        "\n",
        "</longcat_tool_call>",
        separator="\n",
        arguments=ArgumentTags(
            "<longcat_arg_key>",
            "</longcat_arg_key>\n<longcat_arg_value>",
            "</longcat_arg_value>\n",
            ("<longcat_arg_key>", "</longcat_arg_value>", "</longcat_tool_call>"),
        ),
    ),
    ToolMarkup(
        "solar_open2",
        "<|tool_call:start|>",
        "<|tool_call:start|>",
        "\n",
        "<|tool_call:end|>",
        separator="\n",
        arguments=ArgumentTags(
            "<|tool_arg:start|>", "<|tool_arg:value|>", "<|tool_arg:end|>\n", ("<|tool_arg:", "<|tool_call:")
        ),
    ),
    ToolMarkup(
        "minimax_m3",
        f"{_MINIMAX}<tool_call>",
        f'{_MINIMAX}<tool_call>\n{_MINIMAX}<invoke name="',
        '">',
        f"{_MINIMAX}</invoke>\n{_MINIMAX}</tool_call>",
        arguments=ArgumentTags(f"{_MINIMAX}<", ">", f"{_MINIMAX}</{{key}}>", (_MINIMAX,)),
    ),
    # the types of arguments stand in the tags before them; without these tags, all arguments are one text of JSON
    ToolMarkup(
        "kimi_k3",
        "<|open|>tools<|sep|>",
        '<|open|>tools<|sep|><|open|>call tool="',
        '" index="1"<|sep|><|open|>json type="object"<|sep|>',
        "<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
    ),
    ToolMarkup("functionary_v3_1", "<function=", "<function=", ">", "</function>"),
)


def default_markup(parser: str) -> ToolMarkup | None:
    """Returns the first markup of the parser's family; None if there is no such parser."""
    return next((markup for markup in MARKUPS if markup.parser == parser), None)
