"""Images in messages: each leaves one text in the prompt, in the order of the numbers that come back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inflight.errors import InvalidRequestError
from inflight.tokenizer.chat_template import ChatTemplate
from tests.unit.tokenizer.image_templates import (
    ALL_BUT_SYSTEM,
    IMAGES_FIRST,
    LISTS_ONLY,
    TEMPLATES,
    TEXT_ONLY,
    conversations,
    pieces_in,
    pieces_of,
)


def image(number: int = 0) -> dict[str, Any]:
    return {"type": "image", "number": number}


def text(given: str) -> dict[str, Any]:
    return {"type": "text", "text": given}


def template_of(name: str) -> ChatTemplate:
    source, _, token = TEMPLATES[name]
    return ChatTemplate({"default": source}, image_token=token)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("seed", range(3))
def test_images_at_every_place_of_a_conversation(name: str, seed: int) -> None:
    template = template_of(name)
    wanted_text = TEMPLATES[name][1]
    for messages in conversations(seed, 25):
        for opens in (True, False):
            rendered = template.render_chat(messages, add_generation_prompt=opens)
            found = pieces_in(rendered.text, rendered.images, rendered.image_text)
            wanted = pieces_of(messages)
            assert rendered.image_text in (wanted_text, "" if not rendered.images else wanted_text)
            if name == "images first":
                assert sorted(found) == sorted(wanted)
                assert rendered.images == tuple(int(piece) for piece in wanted if piece.isdigit())
            else:
                assert found == wanted, (messages, rendered.text)


def test_what_a_message_looks_like() -> None:
    given = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [image(), text("What?")]},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "Sure?"},
    ]
    assert ChatTemplate({"default": LISTS_ONLY}).render_chat(given).text == (
        "<s>System: Be brief.<end>\nUser:<image>What?<end>\nAssistant: A cat.<end>\nUser: Sure?<end>\nAssistant:"
    )
    first = ChatTemplate({"default": IMAGES_FIRST}).render_chat([{"role": "user", "content": [text("a"), image()]}])
    assert first.text == "user: <image>\na "
    only_text = ChatTemplate({"default": TEXT_ONLY}, image_token="<|image_pad|>")
    assert only_text.render_chat([given[1]]).text == "<user><|image_pad|>\nWhat?"


def test_a_result_keeps_its_images_where_calls_are_text() -> None:
    function = {"name": "look", "arguments": {"text": "here"}}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "a", "content": [text("See:"), image()]},
    ]
    rendered = template_of("two roles").render_chat(messages, add_generation_prompt=False)
    assert rendered.text.endswith("user\nTool result (look): See:<start_of_image><end_of_turn>\n")


def test_joined_messages_have_an_empty_line_between_their_texts() -> None:
    messages = [{"role": "user", "content": [image(), text("a")]}, {"role": "user", "content": [text("b"), image(1)]}]
    rendered = template_of("two roles").render_chat(messages, add_generation_prompt=False)
    assert rendered.text == "<start_of_turn>user\n<start_of_image>a\n\nb<start_of_image><end_of_turn>\n"
    assert rendered.images == (0, 1)


def test_results_in_the_order_of_the_calls_take_their_images_along() -> None:
    calls = [
        {"id": f"abcdefgh{i}", "type": "function", "function": {"name": "look", "arguments": {"text": f"Call{i}."}}}
        for i in range(2)
    ]
    messages = [
        {"role": "user", "content": "Word0."},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "abcdefgh1", "content": [image(0)]},
        {"role": "tool", "tool_call_id": "abcdefgh0", "content": [image(1)]},
    ]
    assert template_of("all but system").render_chat(messages).images == (1, 0)


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([{"role": "user", "content": [image(), text("a <|image_pad|> b")]}], "messages[0]['content'][1]['text']"),
        ([{"role": "user", "content": "<|image_pad|>"}], "messages[0]['content']"),
        (
            [{"role": "user", "content": [image()]}, {"role": "assistant", "content": "<|image_pad|>"}],
            "messages[1]['content']",
        ),
    ],
)
def test_a_text_is_never_taken_for_an_image(messages: list[dict[str, Any]], where: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        template_of("all but system").render_chat(messages)
    assert raised.value.param == where


def test_the_text_of_an_image_is_refused_in_tools_and_documents_too() -> None:
    template = template_of("lists only")
    question = [{"role": "user", "content": [image(), text("?")]}]
    tool = {"type": "function", "function": {"name": "f", "description": "draws <image>"}}
    for given, where in (({"tools": [tool]}, "tools[0]"), ({"documents": [{"text": "<image>"}]}, "documents[0]")):
        with pytest.raises(InvalidRequestError) as raised:
            template.render_chat(question, **given)  # type: ignore[arg-type]
        assert raised.value.param.startswith(where)


def test_a_text_model_may_be_given_the_text_of_another_models_image() -> None:
    assert "<|image_pad|>" in ChatTemplate({"default": ALL_BUT_SYSTEM}).render(
        [{"role": "user", "content": "<|image_pad|>"}]
    )


def test_an_image_that_nothing_can_write_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as raised:
        ChatTemplate({"default": TEXT_ONLY}).render_chat([{"role": "user", "content": [image()]}])
    assert raised.value.param == "messages"


def test_an_image_that_the_template_drops_is_refused() -> None:
    only_last = (
        "{% for m in messages[-1:] %}{% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}"
        "{% endfor %}"
    )
    template = ChatTemplate({"default": only_last}, image_token="<image>")
    question = {"role": "user", "content": [image(), text("?")]}
    assert template.render_chat([question]).text == "<image>?"
    with pytest.raises(InvalidRequestError) as raised:
        template.render_chat([question, {"role": "assistant", "content": "!"}, question])
    assert raised.value.param == "messages"


@pytest.mark.parametrize("part", [{"type": "image"}, {"type": "image", "number": "1"}, {"type": "image_url"}])
def test_a_part_without_a_number_is_refused(part: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        template_of("lists only").render_chat([{"role": "user", "content": [part]}])
    assert raised.value.param == "messages[0]['content'][0]"


def test_the_template_of_a_processor(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "of the tokenizer"}))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}))
    assert ChatTemplate.from_folder(tmp_path).default_source == "of the processor"
    (tmp_path / "chat_template.jinja").write_text("of the file")
    assert ChatTemplate.from_folder(tmp_path).default_source == "of the file"


def test_the_names_of_roles_need_no_memory() -> None:
    template = template_of("lists only")
    for number in range(100):
        messages = [{"role": f"role{number}", "content": [text("a"), image(0)]}, {"role": "user", "content": "b"}]
        rendered = template.render_chat(messages, add_generation_prompt=False)
        assert rendered.text == f"<s>Role{number}: a<image><end>\nUser: b<end>\n"
    fields = template._forms["default"]._fields
    assert max(len(each._found) for each in (fields._takes_parts, fields._needs_parts, fields.images._takes)) < 20
