"""`tool_choice` and `strict` as a grammar: which calls a text may, or must, hold.

| tool_choice | the text |
|---|---|
| "none" | as it comes; the request's tools are neither in the prompt nor parsed, which is the caller's part |
| "auto" | as it comes; once a tool is strict, text in which each call is one of the tools', the strict ones' by their schemas |
| "required" | calls and nothing else: one, or several with `parallel_tool_calls` |
| {"name": f} | one call of f |

In a text that must be a call every tool's arguments follow its schema, strict or not. Without `parallel_tool_calls` the text
ends behind the first call; where no grammar is at work, `create_output_parser(max_tool_calls=1)` leaves out what follows it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from inflight.errors import InvalidRequestError
from inflight.parsers.markup import ToolMarkup
from inflight.sampling_params import SamplingParams, StructuredOutputsParams
from inflight.tokenizer.messages import check_tools

ToolChoice = Literal["none", "auto", "required"] | Mapping[str, str]
Schema = Mapping[str, Any]  # Any: JSON

_NAME = re.compile(r'[^\s"\\\[\]{}<>\x00-\x1f\x7f]+')  # stands in the markup as it is
_ANY_ARGUMENTS: Schema = {"type": "object"}
_NO_ARGUMENTS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class _Tool:
    where: str  # in the request, for errors
    function: Schema
    is_strict: bool


def constrain_tools(
    params: SamplingParams,
    tools: Sequence[Schema] | None,
    tool_choice: ToolChoice = "auto",
    *,
    parallel_tool_calls: bool = True,
    markup: ToolMarkup | None,
) -> SamplingParams:
    """The parameters of a chat that is given `tools`; `params` itself where nothing is to be constrained.

    Args:
        tools: `{"type": "function", "function": {"name", "parameters", "strict"}}`. `strict` may also stand beside "function",
            or the function's fields be the tool's own. A function without parameters takes no arguments.
        markup: how the model writes calls, of `detect_parsers`.

    Raises:
        InvalidRequestError: a tool or the choice is malformed, no call can be made to come, or `params` has its own constraint.
    """
    name = tool_choice.get("name") if isinstance(tool_choice, Mapping) else None
    if name is None and tool_choice not in ("none", "auto", "required"):
        raise InvalidRequestError(f"tool_choice={tool_choice!r} is neither none, auto or required nor names a function")
    checked = [_read_tool(f"tools[{i}]", tool) for i, tool in enumerate(check_tools(tools) or ())]
    if tool_choice == "none" or (tool_choice == "auto" and not any(tool.is_strict for tool in checked)):
        return params
    reason = "a strict tool" if tool_choice == "auto" else f"tool_choice={name or 'required'!r}"
    if not checked:
        raise InvalidRequestError(f"{reason} needs tools, and the request has none")
    if params.structured_outputs is not None:
        raise InvalidRequestError(
            f"structured_outputs and {reason} both constrain the text; leave out one, or set the tools' strict to False"
        )
    if markup is None:
        raise InvalidRequestError(
            f"{reason} needs a model whose chat template writes calls in a known way, with arguments as JSON "
            '(<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>, ... see docs/tool-calls.md); this one does not: '
            "set strict to False, and tool_choice to auto"
        )
    schemas = _argument_schemas(checked, is_forced=tool_choice != "auto")
    if name is not None:
        if name not in schemas:
            raise InvalidRequestError(f"tool_choice names {name!r}, which is none of the tools: {', '.join(schemas)}")
        schemas = {name: schemas[name]}
    is_single = name is not None or not parallel_tool_calls
    tag = _structural_tag(markup, schemas, is_forced=tool_choice != "auto", is_single=is_single)
    return replace(params, structured_outputs=StructuredOutputsParams(structural_tag=tag))


def _read_tool(where: str, tool: Schema) -> _Tool:
    function = tool.get("function", tool)
    if not isinstance(function, Mapping):
        raise InvalidRequestError(f"{where}: function is a {type(function).__name__}, not an object")
    flags = [function.get("strict"), tool.get("strict")]
    if not all(isinstance(flag, bool | None) for flag in flags):
        raise InvalidRequestError(f"{where}: strict is neither true nor false")
    return _Tool(where, function, True in flags)


def _argument_schemas(tools: Sequence[_Tool], *, is_forced: bool) -> dict[str, Schema]:
    """By the tools' names."""
    schemas: dict[str, Schema] = {}
    for tool in tools:
        name = tool.function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidRequestError(
                f"{tool.where} has the name {name!r}; a name is a string without white space, quotes, brackets and backslashes"
            )
        if name in schemas:
            raise InvalidRequestError(
                f"{tool.where} has the name {name!r} of an earlier tool: a call could mean either"
            )
        schemas[name] = _parameters(tool, name) if tool.is_strict or is_forced else _ANY_ARGUMENTS
    return schemas


def _parameters(tool: _Tool, name: str) -> Schema:
    parameters = tool.function.get("parameters")
    if parameters is None:
        return _NO_ARGUMENTS
    if isinstance(parameters, Mapping) and not tool.is_strict:
        parameters = {**_ANY_ARGUMENTS, **parameters}
    if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
        kind = "strict" if tool.is_strict else "one that must be called"
        raise InvalidRequestError(
            f'{tool.where} ({name!r}) is {kind}: its parameters must be a JSON schema with "type": "object", or be left out'
        )
    return parameters


def _structural_tag(
    markup: ToolMarkup, schemas: Mapping[str, Schema], *, is_forced: bool, is_single: bool
) -> dict[str, Any]:  # Any: JSON
    if markup.is_list:
        calls = _list_schema(schemas, is_single=is_single)
        structures = [{"begin": markup.list_begin, "schema": calls, "end": ""}]
    else:
        structures = [
            {"begin": markup.begin(name), "schema": schema, "end": markup.end} for name, schema in schemas.items()
        ]
    tag: dict[str, Any] = {"type": "structural_tag", "structures": structures, "triggers": [markup.trigger]}
    if is_forced or markup.whole_message:
        tag |= {"separator": markup.separator, "at_least_one": is_forced}
    if is_single or markup.is_list:  # a list holds all calls
        tag["stop_after_first"] = True
    return tag


def _list_schema(schemas: Mapping[str, Schema], *, is_single: bool) -> Schema:
    """Of the list of all calls. The schemas move into it, and the references in them with them."""
    items = [
        {
            "type": "object",
            "properties": {
                "name": {"const": name},
                "arguments": _moved(schema, f"#/items/anyOf/{i}/properties/arguments"),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for i, (name, schema) in enumerate(schemas.items())
    ]
    calls: dict[str, Any] = {"type": "array", "items": {"anyOf": items}, "minItems": 1}
    return calls | {"maxItems": 1} if is_single else calls


def _moved(node: Any, root: str) -> Any:  # Any: JSON
    """A schema whose references to its own places point below `root`. Data under const and enum is none."""
    if isinstance(node, Mapping):
        return {
            key: root + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else value
            if key in ("const", "enum")
            else _moved(value, root)
            for key, value in node.items()
        }
    return [_moved(item, root) for item in node] if isinstance(node, list) else node
