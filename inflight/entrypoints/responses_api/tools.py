"""The tools of a request to /v1/responses, as pydantic models, and as the functions that the model sees.

The model knows only functions. So a tool in a namespace becomes a function whose name contains the namespace. A custom tool,
whose input is text, becomes a function with one argument. `PromptTools` remembers which tool a function stands for.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Discriminator, Field, Tag

from inflight.entrypoints.openai.errors import FieldError
from inflight.entrypoints.openai.generation_fields import GrammarText
from inflight.entrypoints.openai.messages import MAX_TOOL_NAME, MAX_TOOLS, ToolName
from inflight.entrypoints.openai.strict_model import StrictModel, no_effect, optional

INPUT = "input"  # the argument of a function that stands for a custom tool
_SERVED = ("function", "custom", "namespace")


class FunctionTool(StrictModel):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = optional("A JSON schema of type object.")
    strict: bool | None = optional("Arguments are made to satisfy the schema; false if left out.")


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


class OtherTool(StrictModel):
    """A tool that only OpenAI's servers run, such as web_search. It is left out."""

    model_config = ConfigDict(extra="ignore")

    type: str = Field(max_length=64, json_schema_extra={"not": {"enum": [*_SERVED]}})


def type_of(value: object) -> object:
    """The type of an item or a tool, which may not be checked yet; None if it has no type."""
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def _kind(tool: object) -> str | None:
    kind = type_of(tool)
    if not isinstance(kind, str):
        return None
    return kind if kind in _SERVED else "other"


_PlainTool = (
    Annotated[FunctionTool, Tag("function")] | Annotated[CustomTool, Tag("custom")] | Annotated[OtherTool, Tag("other")]
)


class NamespaceTool(StrictModel):
    """Tools with a common name, which a call of one of them repeats."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = no_effect("The model sees only the descriptions of the tools.")
    tools: list[Annotated[_PlainTool, Discriminator(_kind)]] = Field(max_length=MAX_TOOLS)


ResponseTools = Annotated[
    list[Annotated[_PlainTool | Annotated[NamespaceTool, Tag("namespace")], Discriminator(_kind)]],
    Field(max_length=MAX_TOOLS, fail_fast=True),
]


class NamedTool(StrictModel):
    type: Literal["function", "custom"]
    name: ToolName
    namespace: str | None = None


class CalledTool(NamedTuple):
    """A tool as the client knows it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


class PromptTools:
    """The functions that the model sees.

    Attributes:
        left_out: the tools that are not served, and the grammars that are not enforced.
    """

    def __init__(self, tools: Sequence[StrictModel], *, enforces_patterns: bool) -> None:
        """
        Args:
            enforces_patterns: whether a grammar can hold an argument to a regular expression, in the calls of this model.

        Raises:
            FieldError: there are too many tools, or two tools would have one name.
        """
        self.left_out: list[str] = []
        self._enforces_patterns = enforces_patterns
        self._functions: dict[str, dict[str, Any]] = {}  # Any: the fields of a chat's `Tool`
        self._called: dict[str, CalledTool] = {}
        for namespace, tool in self._flat(tools):
            called = CalledTool(tool.name, namespace, isinstance(tool, CustomTool))
            name = prompt_name(called.name, namespace, "tools")
            if self._called.setdefault(name, called) != called:
                raise FieldError("tools", f"tools has two tools with the name {name!r}: give each a name of its own")
            shown = self._custom(tool) if isinstance(tool, CustomTool) else _function(tool)
            self._functions[name] = {"type": "function", "function": {"name": name, **shown}}
        if len(self._functions) > MAX_TOOLS:
            raise FieldError("tools", f"the request has {len(self._functions)} tools; at most {MAX_TOOLS} are allowed")

    @property
    def functions(self) -> list[dict[str, Any]]:
        return list(self._functions.values())

    def called(self, name: str) -> CalledTool:
        """The tool for which the function `name` stands. A model may also call a function that it was not given."""
        return self._called.get(name, CalledTool(name))

    def choice(self, tool: NamedTool) -> dict[str, Any]:
        """The choice of the function that stands for `tool`. Without a namespace, the tool may be in any namespace."""
        name = prompt_name(tool.name, tool.namespace, "tool_choice.name")
        if name not in self._called and tool.namespace is None:
            name = next((found for found, called in self._called.items() if called.name == tool.name), name)
        return {"type": "function", "function": {"name": name}}

    def _flat(self, tools: Sequence[StrictModel]) -> Iterator[tuple[str | None, FunctionTool | CustomTool]]:
        """Yields each tool with its namespace, and notes those that are left out."""
        for tool in tools:
            if isinstance(tool, NamespaceTool):
                yield from ((tool.name, member) for _, member in self._flat(tool.tools))
            elif isinstance(tool, FunctionTool | CustomTool):
                yield None, tool
            elif isinstance(tool, OtherTool):
                self.left_out.append(f"tools[] ({tool.type})")

    def _custom(self, tool: CustomTool) -> dict[str, Any]:
        text: dict[str, Any] = {"type": "string"}
        parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
        shown: dict[str, Any] = {"parameters": parameters}
        description = [] if tool.description is None else [tool.description]
        if tool.format is not None and tool.format.definition is not None:
            syntax, definition = tool.format.syntax or "lark", tool.format.definition
            description.append(f"The input must match this {syntax} grammar:\n{definition}")
            if syntax == "regex" and self._enforces_patterns:
                text["pattern"] = f"^(?:{definition})$"
                shown["strict"] = True
            else:
                self.left_out.append(f"tools[] ({tool.name!r}): format.definition")
        if description:
            shown["description"] = "\n\n".join(description)
        return shown


def prompt_name(name: str, namespace: str | None, where: str) -> str:
    """The name of the function that stands for a tool. `where`: the field of the request, for the error.

    Raises:
        FieldError: the name is too long.
    """
    if namespace:
        name = f"{namespace.removesuffix('__')}__{name}"  # the namespaces of MCP servers end with two underscores
    if len(name) > MAX_TOOL_NAME:
        raise FieldError(where, f"the name {name!r} has {len(name)} characters; at most {MAX_TOOL_NAME} are allowed")
    return name


def _function(tool: FunctionTool) -> dict[str, Any]:
    """The function has only the fields that the model should see, because a template writes all of them into the prompt."""
    given = {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict or None}
    return {name: value for name, value in given.items() if value is not None}
