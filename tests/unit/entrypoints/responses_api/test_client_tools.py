"""The tools of OpenAI's that the client runs: the items of their calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import ResponseOutputItem
from pydantic import TypeAdapter

from inflight.entrypoints.responses_api.client_tools import CLIENT_TOOLS, is_run_by_client, output_text

ARGUMENTS: dict[str, dict[str, Any]] = {
    "tool_search": {"query": "mail", "limit": 3},
    "local_shell": {"command": ["ls", "-l"], "working_directory": "/x"},
    "shell": {"commands": ["ls -l"], "timeout_ms": 5},
    "apply_patch": {"type": "update_file", "path": "a", "diff": "@@"},
}


@pytest.mark.parametrize("kind", list(CLIENT_TOOLS))
def test_a_call_is_an_item_that_the_official_client_reads_and_comes_back_as_it_was(kind: str) -> None:
    tool, arguments = CLIENT_TOOLS[kind], ARGUMENTS[kind]
    members = tool.item_members(json.dumps(arguments))
    assert members is not None
    item = {"id": tool.id_prefix + "1", "type": tool.call, "status": "completed", "call_id": "c", **members}
    TypeAdapter(ResponseOutputItem).validate_python(item)
    assert tool.arguments(members[tool.member]) == arguments


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("local_shell", '{"command": ["rm", "-rf", "/tmp/x'),  # cut
        ("local_shell", '{"command": "ls"}'),
        ("local_shell", "{}"),
        ("local_shell", "ls"),
        ("shell", '{"commands": ["ls"], "timeout_ms": "soon"}'),
        ("shell", '{"commands": ["ls", 1]}'),
        ("shell", '{"commands": [["ls"]]}'),
        ("shell", '{"commands": ["ls"], "timeout_ms": true}'),
        ("local_shell", '{"command": ["ls", null]}'),
        ("apply_patch", '{"type": "delete_file"}'),
        ("apply_patch", '{"type": "rename_file", "path": "a"}'),
        ("tool_search", "[]"),
    ],
)
def test_what_the_client_cannot_run_is_no_item(kind: str, arguments: str) -> None:
    assert CLIENT_TOOLS[kind].item_members(arguments) is None


@pytest.mark.parametrize(
    ("tool", "runs"),
    [
        ({"type": "tool_search", "execution": "client"}, True),
        ({"type": "tool_search"}, False),
        ({"type": "shell"}, True),
        ({"type": "shell", "environment": {"type": "container_reference"}}, False),
        ({"type": "local_shell"}, True),
        ({"type": "apply_patch", "environment": "x"}, True),
        ({"type": "function"}, False),
        ({"type": 5}, False),
    ],
)
def test_who_runs_a_tool(tool: dict[str, Any], runs: bool) -> None:
    assert is_run_by_client(tool) is runs


def test_a_failure_is_told_once() -> None:
    assert (output_text("x", "failed"), output_text("failed", "failed"), output_text(None, None)) == (
        "Error: x",
        "failed",
        "",
    )
