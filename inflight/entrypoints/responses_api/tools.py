"""The tools of a request to /v1/responses, as pydantic models, and as the functions that the model sees.

The model knows only functions. So a tool in a namespace becomes a function whose name contains the namespace. A custom tool,
whose input is text, becomes a function with one argument. A tool of OpenAI's that the client runs becomes a function with the
arguments of its calls. `PromptTools` remembers which tool a function stands for.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Discriminator, Field, Tag

from inflight.entrypoints.fields.field_error import FieldError
from inflight.entrypoints.fields.messages import MAX_TOOL_NAME, MAX_TOOLS, ToolName, chat_tool
from inflight.entrypoints.fields.sampling_fields import GrammarText
from inflight.entrypoints.fields.strict_model import StrictModel, no_effect, optional
from inflight.entrypoints.responses_api.client_tools import CLIENT_TOOLS, ClientTool, is_run_by_client
from inflight.parsers.tool_choice import ToolChoice
from inflight.tokenizer.history.other_calls import INPUT

_FOUND = "input[].tools[]"  # for the header of the answer
_SERVED = ("function", "custom", "namespace")


class FunctionTool(StrictModel):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = optional("A JSON schema of type object.")
    strict: bool | None = optional("Arguments are made to satisfy the schema; false if left out.")
    defer_loading: bool | None = no_effect("The model sees the tool from the beginning.")


class CustomFormat(StrictModel):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: GrammarText | None = optional("The grammar, which the model sees.")


class CustomTool(StrictModel):
    """A tool whose input is text."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: CustomFormat | None = None
    defer_loading: bool | None = no_effect("The model sees the tool from the beginning.")


class ClientRunTool(StrictModel):
    """A tool of OpenAI's that the client runs (`CLIENT_TOOLS`)."""

    type: Literal["tool_search", "local_shell", "shell", "apply_patch"]
    execution: str | None = optional("client for tool_search; OpenAI's servers run any other, so that it is left out.")
    description: str | None = None
    parameters: dict[str, Any] | None = optional("A JSON schema of type object; only for tool_search.")
    environment: dict[str, Any] | None = optional(
        "local for shell; OpenAI's servers run any other, so that it is left out."
    )
    allowed_callers: list[str] | None = no_effect("Only the model calls.")

    @property
    def kind(self) -> ClientTool:
        return CLIENT_TOOLS[self.type]


class OtherTool(StrictModel):
    """A tool that only OpenAI's servers run, such as web_search. It is left out."""

    model_config = ConfigDict(extra="ignore")

    type: str = Field(max_length=64, json_schema_extra={"not": {"enum": [*_SERVED]}})


def type_of(value: object) -> object:
    """The type of an item or a tool, which may not be checked yet; None if it has no type."""
    if isinstance(value, dict):
        return value.get("type")
    return getattr(value, "type", None)


def _kind(tool: object) -> str | None:
    kind = type_of(tool)
    if not isinstance(kind, str):
        return None
    if isinstance(tool, ClientRunTool) or (isinstance(tool, dict) and is_run_by_client(tool)):
        return "client"
    return kind if kind in _SERVED else "other"


_PlainTool = (
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[ClientRunTool, Tag("client")]
    | Annotated[OtherTool, Tag("other")]
)


class NamespaceTool(StrictModel):
    """Tools with a common name, which a call of one of them repeats."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = no_effect("The model sees only the descriptions of the tools.")
    tools: Annotated[list[Annotated[_PlainTool, Discriminator(_kind)]], Field(fail_fast=True)]


_AnyTool = Annotated[_PlainTool | Annotated[NamespaceTool, Tag("namespace")], Discriminator(_kind)]
ResponseTools = Annotated[list[_AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)]
# Those in a history have no limit of their own: `PromptTools` takes as many as it can.
HistoryTools = Annotated[list[_AnyTool], Field(fail_fast=True)]


class NamedTool(StrictModel):
    type: Literal["function", "custom"]
    name: ToolName
    namespace: str | None = None


class ClientToolChoice(StrictModel):
    """A tool of OpenAI's that the client runs has no other name than its type."""

    type: Literal["tool_search", "local_shell", "shell", "apply_patch"]


class CalledTool(NamedTuple):
    """A tool as the client knows it. `client`: of which kind it is, if it is a tool of OpenAI's that the client runs."""

    name: str
    namespace: str | None = None
    is_custom: bool = False
    client: ClientTool | None = None


_KnownTool = FunctionTool | CustomTool | ClientRunTool


class PromptTools:
    """The functions that the model sees.

    Attributes:
        left_out: the tools that are not served, and the grammars that are not enforced.
        hidden: names of functions that the chat template must not list, because the messages have their definitions.
    """

    def __init__(
        self,
        tools: Sequence[StrictModel],
        *,
        enforces_patterns: bool,
        added: Sequence[StrictModel] = (),
        found: Sequence[StrictModel] = (),
    ) -> None:
        """
        Args:
            enforces_patterns: whether a grammar can hold an argument to a regular expression, in the calls of this model.
            added: tools in items of the input, which are listed like `tools`.
            found: tools that the client has found in the middle of the conversation, when the model searched for them.

        Raises:
            FieldError: two of `tools` would have one name, or there are too many.
        """
        self.left_out: list[str] = []
        self._enforces_patterns = enforces_patterns
        self._functions: dict[str, dict[str, Any]] = {}  # Any: the fields of a chat's `Tool`
        self._called: dict[str, CalledTool] = {}
        for namespace, tool in self._readable(tools, "tools[]"):
            self._add(tool, namespace)
        if len(self._functions) > MAX_TOOLS:
            raise FieldError("tools", f"the request has {len(self._functions)} tools; at most {MAX_TOOLS} are allowed")
        self._add_of_history(added, "tools[]", most=MAX_TOOLS)
        listed = list(self._functions)
        self._add_of_history(found, _FOUND)
        newest_first = list(self._functions)[len(listed) :][::-1]
        newest = newest_first[: MAX_TOOLS - len(listed)]
        self.hidden = frozenset(newest)
        self._known = [*listed, *reversed(newest)]
        if len(self._known) < len(self._functions):
            self.left_out.append(_FOUND)

    @property
    def functions(self) -> list[dict[str, Any]]:
        """Those whose calls are checked: all that are listed, and the newest of those that were found. The model can call the
        others, too, because the messages define them."""
        return [self._functions[name] for name in self._known]

    def called(self, name: str) -> CalledTool:
        """The tool for which the function `name` stands. A model may also call a function that it was not given."""
        return self._called.get(name, CalledTool(name))

    def definitions(self, tools: Sequence[StrictModel]) -> list[dict[str, Any]]:
        """The functions that stand for some of the tools."""
        names = (full_name(_name(tool), namespace) for namespace, tool in _flat(tools))
        return [self._functions[name] for name in dict.fromkeys(names) if name in self._functions]

    def choice(self, tool: NamedTool | ClientToolChoice) -> ToolChoice:
        """The choice of the function that stands for `tool`. Without a namespace, the tool may be in any namespace."""
        if isinstance(tool, ClientToolChoice):
            return {"name": tool.type}
        name = prompt_name(tool.name, tool.namespace, "tool_choice.name")
        if name not in self._called and tool.namespace is None:
            name = next((found for found, called in self._called.items() if called.name == tool.name), name)
        return {"name": name}

    def _readable(self, tools: Sequence[StrictModel], where: str) -> Iterator[tuple[str | None, _KnownTool]]:
        """Yields the tools that the model can see, and reports the others."""
        self.left_out += [f"{where} ({kind})" for kind in _left_out(tools)]
        yield from _flat(tools)

    def _add_of_history(self, tools: Sequence[StrictModel], where: str, most: int | None = None) -> None:
        """Add tools of the input. A tool that cannot be added is reported, because it must not end the conversation."""
        for namespace, tool in self._readable(tools, where):
            try:
                if most is not None and len(self._functions) >= most:
                    raise FieldError("input", f"there are more than {most} tools")
                self._add(tool, namespace)
            except FieldError:
                self.left_out.append(f"{where} ({tool.type})")

    def _add(self, tool: _KnownTool, namespace: str | None) -> None:
        """
        Raises:
            FieldError: the name is too long, or belongs to another tool.
        """
        client = tool.kind if isinstance(tool, ClientRunTool) else None
        called = CalledTool(_name(tool), namespace, isinstance(tool, CustomTool), client)
        name = prompt_name(called.name, namespace, "tools")
        if self._called.setdefault(name, called) != called:
            raise FieldError("tools", f"tools has two tools with the name {name!r}: give each a name of its own")
        if name not in self._functions:
            self._functions[name] = chat_tool(name, **self._shown(tool))

    def _shown(self, tool: _KnownTool) -> dict[str, Any]:
        """The fields of the function that stands for the tool."""
        if isinstance(tool, CustomTool):
            return self._custom(tool)
        if isinstance(tool, ClientRunTool):
            return self._client_run(tool)
        return _function(tool)

    def _client_run(self, tool: ClientRunTool) -> dict[str, Any]:
        known = tool.kind.parameters
        parameters = known or tool.parameters or {"type": "object", "properties": {}}
        strict = {"strict": True} if known is not None and self._enforces_patterns else {}
        return {"description": tool.description or tool.kind.description, "parameters": parameters, **strict}

    def _custom(self, tool: CustomTool) -> dict[str, Any]:
        text: dict[str, Any] = {"type": "string"}
        parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
        shown: dict[str, Any] = {"parameters": parameters}
        description = [] if tool.description is None else [tool.description]
        if tool.format is not None and tool.format.definition is not None:
            syntax = tool.format.syntax or "lark"
            definition = tool.format.definition
            description.append(f"The input must match this {syntax} grammar:\n{definition}")
            if syntax == "regex" and self._enforces_patterns:
                text["pattern"] = f"^(?:{definition})$"
                shown["strict"] = True
            else:
                self.left_out.append(f"tools[] ({tool.name!r}): format.definition")
        if description:
            shown["description"] = "\n\n".join(description)
        return shown


def places_of_functions(tools: Iterable[StrictModel]) -> list[str]:
    """The fields of the functions that `PromptTools` makes of `tools`, in their order."""
    places: dict[str, str] = {}
    for place, namespace, tool in _placed(tools, "tools"):
        places.setdefault(full_name(_name(tool), namespace), place)
    return list(places.values())


def _flat(tools: Iterable[StrictModel]) -> Iterator[tuple[str | None, _KnownTool]]:
    """Yields each tool that the model can see, with its namespace."""
    return ((namespace, tool) for _, namespace, tool in _placed(tools, ""))


def _placed(tools: Iterable[StrictModel], field: str) -> Iterator[tuple[str, str | None, _KnownTool]]:
    """Yields the same, with the place in `field`."""
    for index, tool in enumerate(tools):
        place = f"{field}[{index}]"
        if isinstance(tool, NamespaceTool):
            yield from ((inner, tool.name, member) for inner, _, member in _placed(tool.tools, f"{place}.tools"))
        elif isinstance(tool, FunctionTool | CustomTool | ClientRunTool):
            yield place, None, tool


def _left_out(tools: Iterable[StrictModel]) -> Iterator[str]:
    """Yields the types of the other tools."""
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            yield from _left_out(tool.tools)
        elif isinstance(tool, OtherTool):
            yield tool.type


def _name(tool: _KnownTool) -> str:
    return tool.type if isinstance(tool, ClientRunTool) else tool.name


def full_name(name: str, namespace: str | None) -> str:
    # the namespaces of MCP servers end with two underscores
    return f"{namespace.removesuffix('__')}__{name}" if namespace else name


def prompt_name(name: str, namespace: str | None, where: str) -> str:
    """The name of the function that stands for a tool. `where`: the field of the request, for the error.

    Raises:
        FieldError: the name is too long.
    """
    name = full_name(name, namespace)
    if len(name) > MAX_TOOL_NAME:
        raise FieldError(where, f"the name {name!r} has {len(name)} characters; at most {MAX_TOOL_NAME} are allowed")
    return name


def _function(tool: FunctionTool) -> dict[str, Any]:
    return {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict or None}
