"""Turns `tool_choice` and `strict` of a chat request into a grammar, which decides what calls a text may or must contain.

| tool_choice | the text of the model |
|---|---|
| "none" | not constrained; the caller puts no tools into the prompt and looks for no calls in the text |
| "auto" | not constrained. But if a tool is strict, calls must name known tools and satisfy the schemas of strict tools |
| "required" | only calls: one call, or also several if `parallel_tool_calls` is true |
| {"name": f} | one call of f |

If the text must be a call, the arguments of every tool must satisfy its schema, even if the tool is not strict. For a tool
that is not strict, parts of the schema that cannot be enforced are left out. If `parallel_tool_calls` is false, the grammar
ends the text after the first call. If there is no grammar, `create_output_parser(max_tool_calls=1)` leaves out later calls.

If the request also has the constraint `json` or `json_object`, "auto" allows either calls or this JSON.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

from inflight.errors import InvalidRequestError
from inflight.parsers.markup import ToolMarkup
from inflight.sampling_params import SamplingParams
from inflight.structured_output.references import moved, with_local_references
from inflight.structured_output.spec import RESPONSE_FORMAT, SchemaPart
from inflight.structured_outputs_params import MAX_GRAMMAR_LENGTH, StructuredOutputsParams
from inflight.tokenizer.messages import TOOL, check_objects

ToolChoice = Literal["none", "auto", "required"] | Mapping[str, str]
Schema = Mapping[str, Any]  # Any: JSON

_NAME = re.compile(r'[^\s"\\\[\]{}<>\x00-\x1f\x7f]+')  # names are written into the markup without escapes
_OTHER_TYPES = ("array", "string", "number", "integer", "boolean", "null")
_ANY_ARGUMENTS: Schema = {"type": "object"}
_NO_ARGUMENTS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class _Tool:
    where: str  # the place in the request, for error messages
    function: Schema
    is_strict: bool


class _Arguments(NamedTuple):
    """The schema of a call's arguments. `part` has its name for error messages, and says whether the tool is strict."""

    schema: Schema
    part: SchemaPart


def constrain_tools(
    params: SamplingParams,
    tools: Sequence[Schema] | None,
    tool_choice: ToolChoice = "auto",
    *,
    parallel_tool_calls: bool = True,
    markup: ToolMarkup | None,
) -> SamplingParams:
    """Returns the sampling parameters of a chat with `tools`. If no grammar is needed, returns `params` itself.

    Args:
        tools: `{"type": "function", "function": {"name", "parameters", "strict"}}`. `strict` may also be next to "function".
            "function" may be missing, if its fields are in the tool itself. A function without parameters has no arguments.
        markup: how the model writes calls, as `detect_parsers` found it.

    Raises:
        InvalidRequestError: a tool or `tool_choice` is malformed, or calls of this model cannot be enforced, or `params` has
            a constraint that cannot be combined with calls.
    """
    name = tool_choice.get("name") if isinstance(tool_choice, Mapping) else None
    if name is None and tool_choice not in ("none", "auto", "required"):
        raise InvalidRequestError(
            f'tool_choice={tool_choice!r} is not allowed: give "none", "auto", "required", or an object that names a function',
            "tool_choice",
        )
    given = check_objects(tools, "tools", TOOL) or ()
    checked = [_read_tool(f"tools[{i}]", tool) for i, tool in enumerate(given)]
    is_forced = tool_choice not in ("none", "auto")
    has_strict = any(tool.is_strict for tool in checked)
    only_if_forced = markup is not None and (markup.only_forced or (markup.arguments is not None and not has_strict))
    if only_if_forced and not is_forced:
        markup = None
    own = params.structured_outputs
    is_json = own is not None and own.constraint in ("json", "json_object")
    wants_json = is_json and bool(checked) and markup is not None
    if tool_choice == "none" or not (is_forced or has_strict or wants_json):
        return params
    reason = "a strict tool" if tool_choice == "auto" else f"tool_choice={name or 'required'!r}"
    if not checked:
        raise InvalidRequestError(f"{reason} needs tools, and the request has none", "tool_choice")
    if own is not None and not is_json:
        raise InvalidRequestError(
            f"{own.constraint} and {reason} both constrain the text, but only json and json_object can be combined with "
            "calls: leave out one of the two, or set strict of the tools to false",
            own.constraint,
        )
    if markup is None:
        raise InvalidRequestError(
            f"{reason} needs a model whose calls a grammar can describe "
            '(<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>, ... see docs/tool-calls.md). This is not possible '
            "for this model: set strict to false, and tool_choice to auto",
            "" if tool_choice == "auto" else "tool_choice",
        )
    arguments = _arguments(checked, is_forced=is_forced)
    if name is not None:
        if name not in arguments:
            raise InvalidRequestError(
                f"tool_choice names {name!r}, which is none of the tools: {', '.join(arguments)}", "tool_choice"
            )
        arguments = {name: arguments[name]}
    is_single = name is not None or not parallel_tool_calls
    otherwise = own if wants_json and not is_forced else None
    tag = _structural_tag(markup, arguments, otherwise, is_forced=is_forced, is_single=is_single)
    constraint = StructuredOutputsParams(structural_tag=_text(tag))
    if otherwise is not None:  # the request's own constraint keeps its settings for white space
        constraint = replace(
            otherwise, json=None, json_object=None, structural_tag=constraint.structural_tag, lenient=False
        )
    return replace(params, structured_outputs=constraint)


def _read_tool(where: str, tool: Schema) -> _Tool:
    function = tool.get("function", tool)
    if not isinstance(function, Mapping):
        raise InvalidRequestError(f"{where}: function is a {type(function).__name__}, not an object", where)
    flags = [function.get("strict"), tool.get("strict")]
    if not all(isinstance(flag, bool | None) for flag in flags):
        raise InvalidRequestError(f"{where}: strict must be true or false", where)
    return _Tool(where, function, True in flags)


def _arguments(tools: Sequence[_Tool], *, is_forced: bool) -> dict[str, _Arguments]:
    found: dict[str, _Arguments] = {}
    for tool in tools:
        name = tool.function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidRequestError(
                f"{tool.where} has the name {name!r}; a name is a string without white space, quotes, brackets and backslashes",
                tool.where,
            )
        if name in found:
            raise InvalidRequestError(
                f"{tool.where} has the name {name!r} of an earlier tool: give each tool a name of its own", tool.where
            )
        schema = _parameters(tool, name) if tool.is_strict or is_forced else _ANY_ARGUMENTS
        found[name] = _Arguments(schema, SchemaPart("#", tool.where, tool.is_strict, name))
    return found


def _parameters(tool: _Tool, name: str) -> Schema:
    parameters = tool.function.get("parameters")
    if parameters is None:
        return _NO_ARGUMENTS
    if isinstance(parameters, Mapping) and not tool.is_strict and parameters.get("type") not in _OTHER_TYPES:
        parameters = {**parameters, "type": "object"}  # it is absent, null or no type
    if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
        kind = "strict" if tool.is_strict else "a tool that must be called"
        raise InvalidRequestError(
            f'{tool.where} ({name!r}) is {kind}: its parameters must be a JSON schema with "type": "object", or be left out',
            tool.where,
        )
    return parameters


def _structural_tag(
    markup: ToolMarkup,
    arguments: Mapping[str, _Arguments],
    otherwise: StructuredOutputsParams | None,
    *,
    is_forced: bool,
    is_single: bool,
) -> dict[str, Any]:  # Any: JSON
    more = {} if markup.arguments is None else {"arguments": asdict(markup.arguments)}
    if markup.is_list:
        schemas, parts = _call_schemas(arguments, "arguments", "#/items/anyOf")
        calls = {"type": "array", "items": {"anyOf": schemas}, "minItems": 1}
        calls |= {"maxItems": 1} if is_single else {}
        structures = [{"begin": markup.list_begin, "schema": calls, "end": "", "parts": parts}]
    elif markup.whole_message and markup.arguments is None and otherwise is not None:
        # Calls and the JSON of `otherwise` both begin with a brace, so a trigger cannot tell which of them follows.
        schemas, parts = _call_schemas(arguments, "parameters", "#/anyOf")
        structures = [{"begin": "", "schema": {"anyOf": schemas}, "end": "", "parts": parts}]
    else:
        structures = [
            {"begin": markup.begin(name), "schema": each.schema, "end": markup.end, "parts": [each.part], **more}
            for name, each in arguments.items()
        ]
    triggers = [markup.trigger if structures[0]["begin"] else ""]
    tag: dict[str, Any] = {"type": "structural_tag", "structures": structures, "triggers": triggers}
    if is_forced or markup.whole_message or otherwise is not None:
        tag |= {"separator": markup.separator, "at_least_one": is_forced}
    if otherwise is not None:
        schema = json.loads(str(otherwise.json)) if otherwise.json is not None else _ANY_ARGUMENTS
        part = SchemaPart("#", RESPONSE_FORMAT, is_strict=not otherwise.lenient)
        tag["otherwise"] = {"begin": "", "schema": schema, "end": "", "parts": [part]}
    if is_single or markup.is_list:  # all calls are in one list, after which the text ends
        tag["stop_after_first"] = True
    return tag


def _call_schemas(arguments: Mapping[str, _Arguments], key: str, root: str) -> tuple[list[Schema], list[SchemaPart]]:
    """Returns two lists with one entry for each tool: the schema of a call as a JSON object, and the `SchemaPart` of the call's
    arguments. `root`: the place at which the caller puts the first list."""
    schemas: list[Schema] = []
    parts: list[SchemaPart] = []
    for i, (name, each) in enumerate(arguments.items()):
        place = f"{root}/{i}/properties/{key}"
        properties = {"name": {"const": name}, key: moved(with_local_references(each.schema), place)}
        required = ["name", key]
        schemas.append(
            {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        )
        parts.append(each.part._replace(pointer=place))
    return schemas, parts


def _text(tag: Schema) -> str:
    text = json.dumps(tag, ensure_ascii=False)
    if len(text) > MAX_GRAMMAR_LENGTH:
        raise InvalidRequestError(
            f"the schemas of the tools and of response_format have {len(text)} characters together, but at most "
            f"{MAX_GRAMMAR_LENGTH} can be enforced: give fewer or smaller schemas, or set strict to false and tool_choice "
            "to auto"
        )
    return text
