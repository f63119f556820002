"""What the model reads of the blocks of Anthropic's messages, and what is left out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inflight.entrypoints.fields.field_error import FieldError
from tests.unit.entrypoints.anthropic.test_blocks import UNKNOWN
from tests.unit.entrypoints.anthropic.test_translation import translated
from tests.unit.entrypoints.refusals import refused

SAID: dict[str, Any] = {"type": "text", "text": "a"}
CALL = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "done"}
SERVER_CALL = {"type": "server_tool_use", "id": "srv", "name": "web_search", "input": {"query": "x"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
NO_IMAGE = "[image: left out, because this model reads text only]"
FILE = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "x"}}
NO_FILE = "[document: left out, because this model reads text only]"
MEDIA = {"image": IMAGE, "document": FILE, "container_upload": {"type": "container_upload", "file_id": "x"}}
END = [{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]


def read(messages: list[Any], **more: Any) -> list[tuple[str, Any]]:
    """The role and the content of each message of the chat."""
    return [(message["role"], message.get("content")) for message in translated(messages, **more).prompt.messages]


@pytest.mark.parametrize("kind", [kind for kind in UNKNOWN if kind not in MEDIA])
def test_an_unknown_block_is_left_out_wherever_it_is(kind: str) -> None:
    block = {"type": kind, "id": "srv", "tool_use_id": "srv", "text": "never", "content": [{"type": "text"}]}
    history: list[dict[str, Any]] = [
        {"role": "user", "content": [SAID, block]},
        {"role": "assistant", "content": [block, SAID, CALL, block]},
        {"role": "user", "content": [{**RESULT, "content": [block, {"type": "text", "text": "done"}]}, block]},
        {"role": "system", "content": [block, SAID]},
        {"role": "assistant", "content": [block]},
        {"role": "user", "content": [block]},
    ]
    expected = [
        ("system", "a"), ("user", "a"), ("assistant", "a"), ("tool", "done"), ("system", "a"), ("assistant", ""), ("user", ""),
    ]  # fmt: skip
    assert read(history, system=[block, SAID]) == expected
    left_out = translated(history, system=[block, SAID]).left_out
    places = [
        "system[]",
        *["messages[].content[]"] * 3,
        "messages[].content[].content[]",
        *["messages[].content[]"] * 4,
    ]
    assert sorted(left_out) == sorted(f"{place} ({kind})" for place in places)


@pytest.mark.parametrize("block", MEDIA.values(), ids=MEDIA)
def test_a_medium_is_an_error_only_where_the_client_asks_about_it(block: dict[str, Any]) -> None:
    text = f"[{block['type']}: left out, because this model reads text only]"
    question = {"role": "user", "content": [SAID, block]}
    for messages, param in (
        ([question], "messages[0].content[1].type"),
        ([*END, question], "messages[2].content[1].type"),
        ([question, {"role": "assistant", "content": "It shows"}], "messages[0].content[1].type"),  # it has begun
        ([{"role": "system", "content": [block]}, {"role": "user", "content": "c"}], "messages[0].content[0].type"),
    ):
        with refused(param):
            translated(messages)
    assert read([question, *END])[0] == ("user", f"a\n{text}")
    result = [{**RESULT, "content": [SAID, block]}]
    answered = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [CALL]}]
    found = translated([*answered, {"role": "user", "content": result}])
    assert found.prompt.messages[-1]["content"] == f"a\n{text}"
    assert found.left_out == (f"messages[].content[].content[] ({block['type']})",)
    with pytest.raises(FieldError):
        translated(END[1:], system=[block])
    assert read(END, system=[block])[0] == ("system", text)


def test_text_in_other_blocks_is_read() -> None:
    document = {"type": "document", "title": "T", "context": "C", "source": {"type": "text", "data": "D"}}
    pieces = {"type": "document", "source": {"type": "content", "content": [SAID, {"type": "odd"}]}}
    plain = {"type": "document", "source": {"type": "content", "content": "P"}}
    search = {"type": "search_result", "source": "http://x", "title": "S", "content": [SAID, {"type": "odd"}]}
    user = {"role": "user", "content": [document, pieces, plain, search]}
    assert read([user]) == [("user", "T\nC\nD\na\nP\nS\nhttp://x\na")]
    left_out = ("messages[].content[].source.content[] (odd)", "messages[].content[].content[] (odd)")
    assert translated([user]).left_out == left_out
    result = {**RESULT, "content": [document, search]}
    assert read([{"role": "user", "content": [result]}]) == [("tool", "T\nC\nD\nS\nhttp://x\na")]
    summary = {"role": "assistant", "content": [{"type": "compaction", "content": "Summary."}, SAID]}
    assert read([summary, END[1]])[0] == ("assistant", "Summary.\na")
    with_image = {"type": "document", "source": {"type": "content", "content": [IMAGE]}}
    with refused("messages[0].content[0].source.content[0].type"):
        translated([{"role": "user", "content": [with_image]}])


def test_the_result_of_a_call_that_is_left_out_goes_with_it() -> None:
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [SERVER_CALL, {**CALL, "id": "2"}]},
        {"role": "user", "content": [{**RESULT, "tool_use_id": "srv"}, {**RESULT, "tool_use_id": "2"}]},
    ]
    assert read(history) == [("user", "a"), ("assistant", None), ("tool", "done")]
    assert translated(history).left_out == (
        "messages[].content[] (server_tool_use)", "messages[].content[] (tool_result)",
    )  # fmt: skip
    # a call of the client that has the same id is kept, and so is its result
    history[1]["content"] = [{**SERVER_CALL, "id": "1"}, CALL]
    history[2]["content"] = [RESULT]
    assert read(history)[-1] == ("tool", "done")


def test_blocks_in_a_message_of_a_wrong_role() -> None:
    thought = {"type": "thinking", "thinking": "Hm."}
    asked = {"role": "user", "content": [SAID, thought, CALL]}
    assert read([asked, *END, {"role": "user", "content": [RESULT]}]) == [
        ("user", "a"), ("assistant", "b"), ("user", "c"), ("user", ""),
    ]  # fmt: skip
    assert translated([asked]).left_out == ("messages[].content[] (thinking)", "messages[].content[] (tool_use)")
    # results between the blocks of the assistant stay at their places
    answered = {"role": "assistant", "content": [SAID, CALL, RESULT, {"type": "text", "text": "So."}]}
    assert read([answered, END[1]]) == [("assistant", "a"), ("tool", "done"), ("assistant", "So."), ("user", "c")]


def test_a_tool_that_is_added_is_defined_where_it_is_added() -> None:
    tools = [{"name": "late", "defer_loading": True}, {"name": "listed"}]
    added: list[Any] = [
        {"type": "tool_definition", "definition": {"name": "new", "description": "New."}},
        {"type": "tool_reference", "name": "late"},
        {"type": "tool_reference", "tool_name": "listed"},
        {"type": "tool_definition", "definition": {"name": "listed", "description": "Again."}},
        {"type": "mcp_tool_reference", "server_name": "x", "name": "y"},
        {"type": "tool_definition", "definition": {"type": "web_search_20250305", "name": "web_search"}},
    ]
    blocks = [{"type": "tool_addition", "tool": tool} for tool in added]
    found = translated([{"role": "user", "content": "a"}, {"role": "system", "content": blocks}], tools=tools)
    new, late, listed, again = found.prompt.messages[-1]["content"].split("\n")
    assert [json.loads(text)["function"]["name"] for text in (new, late, again)] == ["new", "late", "listed"]
    assert listed == "listed"
    assert [tool["function"]["name"] for tool in found.prompt.tools] == ["listed", "new", "late"]
    assert found.hidden_tools == {"new", "late"}
    assert found.left_out == ("messages[].content[] (tool_addition)",) * 2
