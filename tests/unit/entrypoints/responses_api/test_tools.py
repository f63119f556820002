"""Tools as the functions that the model sees."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from inflight.entrypoints.fields.messages import MAX_TOOLS
from inflight.entrypoints.responses_api.client_tools import CLIENT_TOOLS
from inflight.entrypoints.responses_api.tools import (
    CalledTool,
    ClientToolChoice,
    HistoryTools,
    NamedTool,
    PromptTools,
    ResponseTools,
    places_of_functions,
)
from tests.unit.entrypoints.refusals import refused

FUNCTION: dict[str, Any] = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}


def prompt_tools(*tools: dict[str, Any], enforces_patterns: bool = False) -> PromptTools:
    return PromptTools(TypeAdapter(ResponseTools).validate_python(list(tools)), enforces_patterns=enforces_patterns)


def functions(*tools: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    """What the template gets."""
    return [tool["function"] for tool in prompt_tools(*tools, **more).functions]


def test_places_of_functions() -> None:
    given = [
        FUNCTION,
        {"type": "web_search"},
        {"type": "namespace", "name": "n", "tools": [FUNCTION, {**FUNCTION, "name": "g"}]},
        FUNCTION,  # the same tool again is no new function
        {"type": "custom", "name": "c"},
    ]
    tools = TypeAdapter(ResponseTools).validate_python(given)
    places = places_of_functions(tools)
    assert places == ["tools[0]", "tools[2].tools[0]", "tools[2].tools[1]", "tools[4]"]
    assert len(places) == len(prompt_tools(*given).functions)


@pytest.mark.parametrize(("strict", "shown"), [({}, {}), ({"strict": False}, {}), ({"strict": True}, {"strict": True})])
def test_a_function_has_only_what_it_needs(strict: dict[str, Any], shown: dict[str, Any]) -> None:
    assert functions({**FUNCTION, **strict}) == [
        {"name": "f", "description": "d", "parameters": {"type": "object"}, **shown}
    ]
    assert functions({"type": "function", "name": "f", "description": None, "parameters": None}) == [{"name": "f"}]


def test_a_tool_of_a_namespace_has_its_name_in_front() -> None:
    custom = {"type": "custom", "name": "exec"}
    tools = prompt_tools(
        FUNCTION, {"type": "namespace", "name": "ns", "description": "d", "tools": [FUNCTION, custom, {"type": "mcp"}]}
    )
    assert [tool["function"]["name"] for tool in tools.functions] == ["f", "ns__f", "ns__exec"]
    assert tools.called("f") == CalledTool("f")
    assert tools.called("ns__f") == CalledTool("f", "ns")
    assert tools.called("ns__exec") == CalledTool("exec", "ns", is_custom=True)
    assert tools.called("unknown") == CalledTool("unknown")
    assert tools.left_out == ["tools[] (mcp)"]


@pytest.mark.parametrize(
    ("name", "namespace", "chosen"),
    [("f", None, "f"), ("exec", None, "ns__exec"), ("exec", "ns", "ns__exec"), ("exec", "other", "other__exec")],
)
def test_a_choice_names_the_function(name: str, namespace: str | None, chosen: str) -> None:
    tools = prompt_tools(FUNCTION, {"type": "namespace", "name": "ns", "tools": [{**FUNCTION, "name": "exec"}]})
    assert tools.choice(NamedTool(type="function", name=name, namespace=namespace)) == {"name": chosen}  # fmt: skip


def test_a_custom_tool_is_a_function_with_one_argument() -> None:
    (shown,) = functions({"type": "custom", "name": "patch", "description": "d", "format": {"type": "text"}})
    text = {"type": "string"}
    parameters = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
    assert shown == {"name": "patch", "description": "d", "parameters": parameters}


def test_a_grammar_is_shown_and_named_if_it_is_not_enforced() -> None:
    tool = {"type": "custom", "name": "patch", "description": "d", "format": LARK}
    (shown,) = functions(tool, enforces_patterns=True)
    assert shown["description"] == 'd\n\nThe input must match this lark grammar:\nstart: "a"'
    assert "strict" not in shown
    assert prompt_tools(tool, enforces_patterns=True).left_out == ["tools[] ('patch'): format.definition"]


@pytest.mark.parametrize("enforces", [True, False])
def test_a_regex_is_enforced_if_the_models_calls_allow_it(enforces: bool) -> None:
    tool = {"type": "custom", "name": "t", "format": {"type": "grammar", "syntax": "regex", "definition": "a|b"}}
    (shown,) = functions(tool, enforces_patterns=enforces)
    assert shown["parameters"]["properties"]["input"].get("pattern") == ("^(?:a|b)$" if enforces else None)
    assert shown.get("strict") is (True if enforces else None)
    assert bool(prompt_tools(tool, enforces_patterns=enforces).left_out) is not enforces


@pytest.mark.parametrize("kind", list(CLIENT_TOOLS))
def test_a_tool_that_the_client_runs_is_a_function(kind: str) -> None:
    given = {"type": kind, "execution": "client", "environment": {"type": "local"}}
    tools = prompt_tools(given, enforces_patterns=True)
    (tool,) = tools.functions
    shown = tool["function"]
    assert (shown["name"], shown["parameters"]["type"]) == (kind, "object")
    assert shown.get("strict", False) is (CLIENT_TOOLS[kind].parameters is not None)
    assert shown["description"]
    assert tools.called(kind) == CalledTool(kind, client=CLIENT_TOOLS[kind])
    assert tools.left_out == []
    assert "strict" not in functions(given)[0]
    assert tools.choice(ClientToolChoice.model_validate({"type": kind})) == {"name": kind}


def test_a_search_has_the_schema_of_the_client() -> None:
    schema = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
    (shown,) = functions({"type": "tool_search", "execution": "client", "description": "d", "parameters": schema})
    assert shown == {"name": "tool_search", "description": "d", "parameters": schema}


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "tool_search"},
        {"type": "tool_search", "execution": "server"},
        {"type": "shell", "environment": {"type": "container_auto"}},
        {"type": "unheard_of", "execution": "client"},
    ],
)
def test_a_tool_that_the_client_does_not_run_is_left_out(tool: dict[str, Any]) -> None:
    tools = prompt_tools(tool)
    assert tools.functions == []
    assert tools.left_out == [f"tools[] ({tool['type']})"]


def test_a_tool_that_was_found_is_hidden_unless_it_is_listed() -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseTools)
    listed, found = adapter.validate_python([FUNCTION]), adapter.validate_python([FUNCTION, {**FUNCTION, "name": "g"}])
    tools = PromptTools(listed, enforces_patterns=False, found=found)
    assert [tool["function"]["name"] for tool in tools.functions] == ["f", "g"]
    assert tools.hidden == {"g"}
    assert [tool["function"]["name"] for tool in tools.definitions(found)] == ["f", "g"]


def test_names_are_told_apart() -> None:
    assert len(functions(FUNCTION, FUNCTION)) == 1, "a client may repeat a tool in an item"
    with refused("tools"):
        prompt_tools({**FUNCTION, "name": "ns__f"}, {"type": "namespace", "name": "ns", "tools": [FUNCTION]})
    with refused("tools"):
        prompt_tools({"type": "namespace", "name": "n" * 150, "tools": [{**FUNCTION, "name": "f" * 150}]})


def test_there_are_not_too_many_tools() -> None:
    tools = [{**FUNCTION, "name": f"f{i}"} for i in range(MAX_TOOLS)]
    assert len(functions(*tools)) == MAX_TOOLS
    namespace = {"type": "namespace", "name": "ns", "tools": tools}
    with refused("tools"):
        prompt_tools(*tools[1:], namespace)


def test_tools_of_a_history_never_end_the_conversation() -> None:
    """All that were found are defined, and the calls of the newest are checked. A tool that cannot be added is reported."""
    adapter: TypeAdapter[Any] = TypeAdapter(HistoryTools)
    many = adapter.validate_python([{**FUNCTION, "name": f"f{i}"} for i in range(1000)])
    listed = adapter.validate_python([FUNCTION])
    tools = PromptTools(listed, enforces_patterns=False, found=many)
    names = [tool["function"]["name"] for tool in tools.functions]
    assert names == ["f", *(f"f{i}" for i in range(1000 - MAX_TOOLS + 1, 1000))]
    assert tools.hidden == set(names[1:]) and len(tools.definitions(many)) == 1000
    assert tools.left_out == ["input[].tools[]"]
    added = PromptTools(listed, enforces_patterns=False, added=many)
    assert [tool["function"]["name"] for tool in added.functions] == ["f", *(f"f{i}" for i in range(MAX_TOOLS - 1))]
    assert not added.hidden and set(added.left_out) == {"tools[] (function)"}
    wrong = adapter.validate_python(
        [
            {"type": "custom", "name": "f"},
            {"type": "namespace", "name": "n" * 150, "tools": [{**FUNCTION, "name": "f" * 150}]},
            {"type": "namespace", "name": "ns", "tools": [{**FUNCTION, "name": f"f{i}"} for i in range(1000)]},
        ]
    )
    for where in ("found", "added"):
        left = PromptTools(listed, enforces_patterns=False, **{where: wrong})
        assert left.called("f") == CalledTool("f") and len(left.functions) == MAX_TOOLS
        place = "input[].tools[]" if where == "found" else "tools[]"
        assert {f"{place} (custom)", f"{place} (function)"} <= set(left.left_out)
        assert len(left.definitions(wrong)) in (1001, MAX_TOOLS)


@pytest.mark.parametrize(
    "tool", [{"type": 5}, {"name": "f"}, {"type": "namespace", "name": "n", "tools": [{"type": "namespace"}]}]
)
def test_a_tool_has_a_type(tool: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        prompt_tools(tool)
