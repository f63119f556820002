"""The tools of OpenAI's that the client itself runs, such as its shell: `CLIENT_TOOLS`, a row for each.

OpenAI defines what their calls look like, so a request gives only the type of the tool. The model sees a function, and its call
becomes an item of the tool's own type.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from inflight.entrypoints.fields.messages import read_object

_TEXT: Mapping[str, Any] = {"type": "string"}  # Any: JSON
_NUMBER: Mapping[str, Any] = {"type": "integer"}
_TYPES: Mapping[str, type] = {"string": str, "integer": int, "array": list}
# the field and the value with which a tool says that OpenAI's servers run it
_RUN_BY_SERVERS = ("container_auto", "container_reference")


class ClientTool(NamedTuple):
    """
    Attributes:
        type: the type in `tools`. It is also the name of the function that the model sees.
        call, output: the types of the items with a call, and with its result.
        id_prefix: the ids of calls begin with it.
        member: the member of a call that has the arguments.
        parameters: a JSON schema of the arguments; None if the tool in the request has it.
        defaults: members of the arguments that the model does not see.
        more: further members of a call.
    """

    type: str
    call: str
    output: str
    id_prefix: str
    member: str
    description: str
    parameters: Mapping[str, Any] | None
    defaults: Mapping[str, Any] = {}
    more: Mapping[str, Any] = {}

    def item_members(self, arguments: str) -> dict[str, Any] | None:
        """The members of a call's item, from the arguments that the model has written. None if they are not what the client can
        run: they are cut or malformed, a required argument is missing, or one is not of the declared kind."""
        found = read_object(arguments)
        if found is None or not self._fits(found):
            return None
        return {self.member: {**self.defaults, **found}, **self.more}

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of an earlier call as the model has written them. `given`: its member."""
        return {
            name: value for name, value in given.items() if value is not None and self.defaults.get(name, self) != value
        }

    def _fits(self, arguments: Mapping[str, Any]) -> bool:
        schema = self.parameters or {}
        known = schema.get("properties", {})
        return arguments.keys() >= set(schema.get("required", ())) and all(
            _is_of_kind(value, known[name]) for name, value in arguments.items() if name in known
        )


def _is_of_kind(value: object, schema: Mapping[str, Any]) -> bool:
    """Whether a value satisfies the schema of one of the parameters below."""
    if isinstance(value, bool) or not isinstance(value, _TYPES[schema["type"]]):
        return False
    if isinstance(value, list):
        return all(_is_of_kind(item, schema["items"]) for item in value)
    return "enum" not in schema or value in schema["enum"]


def _object(required: str, **properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required.split(), "additionalProperties": False}


_ALL = (
    ClientTool(
        type="tool_search",
        call="tool_search_call",
        output="tool_search_output",
        id_prefix="tsc_",
        member="arguments",
        description="Finds more tools.",
        parameters=None,
        more={"execution": "client"},
    ),
    ClientTool(
        type="local_shell",
        call="local_shell_call",
        output="local_shell_call_output",
        id_prefix="lsh_",
        member="action",
        description="Runs one command on the user's machine, and returns its output.",
        parameters=_object(
            "command",
            command={
                "type": "array",
                "items": _TEXT,
                "description": 'The program and its arguments, such as ["ls", "-l"].',
            },
            working_directory={**_TEXT, "description": "The folder in which the command runs."},
            timeout_ms={**_NUMBER, "description": "The command is ended after this number of milliseconds."},
        ),
        defaults={"type": "exec", "env": {}},
    ),
    ClientTool(
        type="shell",
        call="shell_call",
        output="shell_call_output",
        id_prefix="sh_",
        member="action",
        description="Runs shell commands on the user's machine, and returns their output.",
        parameters=_object(
            "commands",
            commands={"type": "array", "items": _TEXT, "description": "The command lines."},
            timeout_ms={**_NUMBER, "description": "The commands are ended after this number of milliseconds."},
            max_output_length={**_NUMBER, "description": "Return at most this number of characters."},
        ),
    ),
    ClientTool(
        type="apply_patch",
        call="apply_patch_call",
        output="apply_patch_call_output",
        id_prefix="apc_",
        member="operation",
        description="Creates, changes or deletes one file.",
        parameters=_object(
            "type path",
            type={**_TEXT, "enum": ["create_file", "update_file", "delete_file"]},
            path={**_TEXT, "description": "The file."},
            diff={**_TEXT, "description": "The change as a diff in the V4A format; not for delete_file."},
        ),
    ),
)
CLIENT_TOOLS: Mapping[str, ClientTool] = {tool.type: tool for tool in _ALL}
CALLS: Mapping[str, ClientTool] = {tool.call: tool for tool in _ALL}
OUTPUTS: Mapping[str, ClientTool] = {tool.output: tool for tool in _ALL}


def is_run_by_client(tool: Mapping[str, Any]) -> bool:
    """Whether the client runs this tool of a request, which is a JSON object that may not be checked yet."""
    kind, environment = tool.get("type"), tool.get("environment")
    if not isinstance(kind, str) or kind not in CLIENT_TOOLS:
        return False
    if kind == "tool_search":
        return tool.get("execution") == "client"
    return not isinstance(environment, dict) or environment.get("type") not in _RUN_BY_SERVERS


def output_text(output: object, status: str | None) -> str:
    """What the model reads as the result of a call."""
    if output is None:
        text = status or ""
    else:
        text = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
    return f"Error: {text}" if status == "failed" and text != "failed" else text
