"""The forms of calls that templates only describe in their instructions: how to recognise the instructions, and how to write
calls in these forms. The names are those of the tool parsers that read the forms."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

# A pattern of the text around the list of tools. The first one that is found counts.
CALL_SIGNS: Mapping[str, re.Pattern[str]] = {
    "hermes": re.compile(
        r"<tool_call>\s*\{\s*[\"'](name|arguments)[\"']:.{1,80}[\"'](arguments|name)[\"']:.{1,80}\s*</tool_call>"
    ),
    "lfm2": re.compile(r"<\|tool_list_start\|>|List of tools: \[\{"),
    "granite": re.compile(
        r"<\|tool_call\|> followed by a JSON list|<\|start_of_role\|>(available_)?tools<\|end_of_role\|>"
    ),
    "olmo3": re.compile(r"^<function_calls>$|<functions>\s*\[?\{.{,200}name.*</functions>", re.DOTALL | re.MULTILINE),
    "phi4_mini_json": re.compile(r"functools\[\{|<\|tool\|>\s*\["),
    "granite-20b-fc": re.compile(r"<function_call>\s*\{.{1,80}name"),
    "pythonic": re.compile(r"\[func_name1\("),
    "jamba": re.compile(r"<tool_calls>\s*\[?\s*\{.{1,80}name"),
    "internlm": re.compile(r"<\|plugin\|>"),
    "nemotron_mini": re.compile(r"<extra_id_0>System[^<]*<tool> \{"),
    "kimi_k2": re.compile(r"tool_declare<\|im_middle\|>"),
}


def _as_hermes(calls: list[dict[str, Any]]) -> str:  # Any: JSON
    return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in _objects(calls))


def _as_lfm2(calls: list[dict[str, Any]]) -> str:
    return f"<|tool_call_start|>{_as_python_list(calls)}<|tool_call_end|>"


def _as_python_list(calls: list[dict[str, Any]]) -> str:
    written = (_as_python(call["function"].get("name"), _arguments(call)) for call in calls)
    return f"[{', '.join(written)}]"


def _as_olmo3(calls: list[dict[str, Any]]) -> str:
    lines = "\n".join(_as_python(call["function"].get("name"), _arguments(call)) for call in calls)
    return f"<function_calls>\n{lines}\n</function_calls>"


def _as_kimi_k2(calls: list[dict[str, Any]]) -> str:
    written = "".join(
        f"<|tool_call_begin|>{_kimi_id(call, i)}<|tool_call_argument_begin|>"
        f"{json.dumps(_arguments(call), ensure_ascii=False)}<|tool_call_end|>"
        for i, call in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


def _kimi_id(call: Mapping[str, Any], number: int) -> str:
    """The call's id, if it has the form that the model writes."""
    name = call["function"].get("name")
    call_id = call.get("id")
    return (
        call_id
        if isinstance(call_id, str) and call_id.startswith(f"functions.{name}:")
        else f"functions.{name}:{number}"
    )


def _between(before: str, after: str) -> Callable[[list[dict[str, Any]]], str]:
    """Calls as JSON objects with commas between them, and these texts around them."""
    return lambda calls: f"{before}{', '.join(_objects(calls))}{after}"


def _objects(calls: list[dict[str, Any]]) -> list[str]:
    objects = ({"name": call["function"].get("name"), "arguments": _arguments(call)} for call in calls)
    return [json.dumps(each, ensure_ascii=False) for each in objects]


def _as_python(name: object, arguments: object) -> str:
    given = arguments if isinstance(arguments, Mapping) else {}
    pairs = (f"{key}={_literal(value)}" for key, value in given.items())
    return f"{name}({', '.join(pairs)})"


def _literal(value: object) -> str:
    """A value as Python writes it, with double quotes around texts."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, dict):
        entries = (f"{_literal(key)}: {_literal(each)}" for key, each in value.items())
        return f"{{{', '.join(entries)}}}"
    return repr(value)


def as_lines(calls: list[dict[str, Any]]) -> str:
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


FORMS: Mapping[str, Callable[[list[dict[str, Any]]], str]] = {
    "hermes": _as_hermes,
    "lfm2": _as_lfm2,
    "granite": _between("<|tool_call|>[", "]"),
    "olmo3": _as_olmo3,
    "phi4_mini_json": _between("functools[", "]"),
    "granite-20b-fc": lambda calls: " ".join(f"<function_call> {each}" for each in _objects(calls)),
    "pythonic": _as_python_list,
    "jamba": _between("<tool_calls>[", "]</tool_calls>"),
    "internlm": lambda calls: "".join(f"<|action_start|><|plugin|>{each}<|action_end|>" for each in _objects(calls)),
    "nemotron_mini": lambda calls: " ".join(f"<toolcall> {each} </toolcall>" for each in _objects(calls)),
    "kimi_k2": _as_kimi_k2,
}
