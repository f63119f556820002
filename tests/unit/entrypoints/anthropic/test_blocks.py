"""Blocks of known types are checked, and blocks of other types are `OtherBlock`s."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from inflight.entrypoints.anthropic.blocks import ContentBlocks, OtherBlock, ToolResultBlock

BLOCKS: TypeAdapter[Any] = TypeAdapter(ContentBlocks)
UNKNOWN = [
    "server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result",
    "bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "mcp_tool_use", "mcp_tool_result",
    "container_upload", "image", "tool_removal", "fallback", "advisor_tool_result", "unheard_of", "TEXT", "",
]  # fmt: skip


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_block_of_another_type_may_have_any_members(kind: str) -> None:
    for members in ({}, {"content": 5, "id": ["x"], "name": None, "text": "secret", "source": "x"}):
        (found,) = BLOCKS.validate_python([{"type": kind, **members}])
        assert (type(found), found.type) == (OtherBlock, kind)
        assert "secret" not in found.model_dump_json(), "its members are not kept"
        (again,) = BLOCKS.validate_python([found])
        assert again == found


@pytest.mark.parametrize(
    "block",
    [
        {"type": "document", "source": {"type": "base64", "data": "x"}},
        {"type": "document", "source": {"type": "url", "url": "x"}},
        {"type": "document", "source": 5},
        {"type": "document"},
        {"type": "compaction", "content": None},
        {"type": "compaction"},
    ],
)
def test_a_block_without_text_is_another_block(block: dict[str, Any]) -> None:
    assert isinstance(BLOCKS.validate_python([block])[0], OtherBlock)


@pytest.mark.parametrize(
    ("block", "field"),
    [
        ({"type": "text"}, "text"),
        ({"type": "text", "text": 5}, "text"),
        ({"type": "thinking", "thinking": None}, "thinking"),
        ({"type": "tool_use", "id": "1", "input": {}}, "name"),
        ({"type": "tool_use", "id": "1", "name": "f", "input": "{}"}, "input"),
        ({"type": "tool_use", "name": "f", "input": {}}, "id"),
        ({"type": "tool_result"}, "tool_use_id"),
        ({"type": "tool_reference"}, "tool_name"),
        ({"type": "tool_addition"}, "tool"),
        ({"type": "document", "source": {"type": "text"}}, "data"),
        ({"type": "document", "source": {"type": "content", "content": 5}}, "content"),
        ({"type": "search_result", "title": "x", "content": []}, "source"),
        ({"type": "compaction", "content": 5}, "content"),
        ({"text": "x"}, "type"),
        ({"type": None}, "type"),
        ({"type": ["text"]}, "type"),
    ],
)
def test_a_wrong_value_of_a_known_block_is_named(block: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as raised:
        BLOCKS.validate_python([{"type": "text", "text": "x"}, block])
    assert any(error["loc"][0] == 1 and field in error["loc"] for error in raised.value.errors())


@pytest.mark.parametrize(
    ("content", "text"), [({"n": 1}, '{"n": 1}'), ([1, "a"], '[1, "a"]'), (5, "5"), (True, "true")]
)
def test_a_result_may_be_any_json(content: Any, text: str) -> None:
    block = ToolResultBlock.model_validate({"type": "tool_result", "tool_use_id": "1", "content": content})
    assert block.content == text
