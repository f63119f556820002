"""`strict` tools: free text in which a tool call must be one of the tools', with arguments that its schema admits.

One markup is known, Hermes' and Qwen's (and the embedded model's):

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from inflight.errors import InvalidRequestError
from inflight.sampling_params import SamplingParams, StructuredOutputsParams
from inflight.tokenizer.chat_template import ChatTemplate
from inflight.tokenizer.messages import check_tools

_TRIGGER = "<tool_call>"
_NAME = re.compile(r'[^"\\\x00-\x1f\x7f]+')  # stands in the call as it is
_ANY_ARGUMENTS = {"type": "object"}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def with_strict_tools(
    params: SamplingParams, tools: Sequence[Mapping[str, Any]] | None, template: ChatTemplate
) -> SamplingParams:
    """The parameters of a chat that is given `tools`: constrained to their calls where one is strict, else as they are.

    Raises:
        InvalidRequestError: a tool is malformed, `template` writes calls in another way, or `params` has its own constraint.
    """
    constraint = strict_tool_calls(tools)
    if constraint is None:
        return params
    if params.structured_outputs is not None:
        raise InvalidRequestError(
            "structured_outputs and a strict tool both constrain the text; leave out one, or set the tools' strict to False"
        )
    if not _writes_such_calls(template):
        raise InvalidRequestError(
            f"a strict tool needs a model whose chat template writes calls as {_begin('NAME')}{{...}}{_end()}; "
            "this one does not: set strict to False"
        )
    return replace(params, structured_outputs=constraint)


def strict_tool_calls(tools: Sequence[Mapping[str, Any]] | None) -> StructuredOutputsParams | None:  # Any: JSON
    """The constraint of tools `{"type": "function", "function": {"name", "parameters", "strict"}}`; None if none is strict.

    Arguments satisfy `parameters` where the tool is strict (there are none without it), and are any JSON object where it is
    not. `strict` may also stand beside "function", or the function's fields be the tool's own.

    Raises:
        InvalidRequestError: naming the index of a tool that is malformed.
    """
    checked = [_read_tool(f"tools[{i}]", tool) for i, tool in enumerate(check_tools(tools) or ())]
    if not any(strict for _, strict in checked):
        return None
    structures: dict[str, dict[str, Any]] = {}
    for i, (function, strict) in enumerate(checked):
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidRequestError(
                f"tools[{i}] has the name {name!r}; a name is a string without quotes, backslashes and control characters"
            )
        if name in structures:
            raise InvalidRequestError(f"tools[{i}] has the name {name!r} of an earlier tool: a call could mean either")
        schema = _parameters(f"tools[{i}] ({name!r})", function) if strict else _ANY_ARGUMENTS
        structures[name] = {"begin": _begin(name), "schema": schema, "end": _end()}
    tag = {"type": "structural_tag", "structures": list(structures.values()), "triggers": [_TRIGGER]}
    return StructuredOutputsParams(structural_tag=tag)


def _begin(name: str) -> str:
    return f'{_TRIGGER}\n{{"name": "{name}", "arguments": '


def _end() -> str:
    return "}\n</tool_call>"


def _read_tool(where: str, tool: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """The function's own fields, and whether it is strict."""
    function = tool.get("function", tool)
    if not isinstance(function, Mapping):
        raise InvalidRequestError(f"{where}: function is a {type(function).__name__}, not an object")
    flags = [function.get("strict"), tool.get("strict")]
    if not all(isinstance(flag, bool | None) for flag in flags):
        raise InvalidRequestError(f"{where}: strict is neither true nor false")
    return function, True in flags


def _parameters(where: str, function: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = function.get("parameters")
    if parameters is None:
        return _NO_ARGUMENTS
    if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
        raise InvalidRequestError(
            f'{where} is strict: its parameters must be a JSON schema with "type": "object", or be left out'
        )
    return parameters


def _writes_such_calls(template: ChatTemplate) -> bool:
    """Whether a call in a conversation comes out as the tags here say: then the model, too, has learned to write it so."""
    arguments = {"a": 1}
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": _ANY_ARGUMENTS}}
    try:
        text = template.render([{"role": "user", "content": "?"}, turn], tools=[tool], add_generation_prompt=False)
    except InvalidRequestError:  # it refuses such a conversation
        return False
    return f"{_begin('f')}{json.dumps(arguments)}{_end()}" in text
