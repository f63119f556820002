"""Content parts that the model cannot read."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from inflight.entrypoints.fields.content_parts import ContentPart, PlainPart, TextPart, is_part, readable_parts
from inflight.entrypoints.fields.images import OtherPart, RequestImages
from tests.unit.entrypoints.refusals import refused

PARTS: TypeAdapter[Any] = TypeAdapter(list[ContentPart])
NO_IMAGES = RequestImages(are_read=False)
MEDIA = {
    "image_url": "image", "input_image": "image", "image": "image", "computer_screenshot": "screenshot", "input_audio": "audio",
    "video_url": "video", "file": "file", "input_file": "file", "document": "document", "container_upload": "container_upload",
}  # fmt: skip


@pytest.mark.parametrize("kind", list(MEDIA))
def test_a_medium_is_an_error_or_a_text(kind: str) -> None:
    parts = PARTS.validate_python([{"type": "text", "text": "a"}, {"type": kind, kind: {"url": "data:"}}])
    with refused("messages[3].content[1].type"):
        readable_parts(parts, "messages[3].content", [], NO_IMAGES, is_asked=True)
    left_out: list[str] = []
    found = readable_parts(parts, "messages[3].content", left_out, NO_IMAGES, is_asked=False)
    assert [part.text for part in found if isinstance(part, TextPart)] == [
        "a", f"[{MEDIA[kind]}: left out, because this model reads text only]",
    ]  # fmt: skip
    assert left_out == [f"messages[].content[] ({kind})"]


@pytest.mark.parametrize("kind", ["unheard_of", "", "reasoning", "TEXT"])
@pytest.mark.parametrize("is_asked", [True, False])
def test_a_part_of_an_unknown_type_is_left_out(kind: str, is_asked: bool) -> None:
    parts = PARTS.validate_python([{"type": kind, "text": "a"}, {"type": "text", "text": "b"}])
    left_out: list[str] = []
    assert readable_parts(parts, "x", left_out, NO_IMAGES, is_asked=is_asked) == [TextPart(type="text", text="b")]
    assert left_out == [f"x[] ({kind})"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text"},
        {"type": "refusal", "text": "a"},
        {"type": "input_text", "text": 5},
        {"text": "a"},
        {"type": 5},
        "a",
    ],
)
def test_a_known_part_with_a_wrong_value_is_an_error(part: object) -> None:
    with pytest.raises(ValidationError):
        PARTS.validate_python([part])


def test_where_thoughts_are_no_parts_they_are_left_out() -> None:
    parts = TypeAdapter(list[PlainPart]).validate_python([{"type": "thinking", "thinking": "hm"}])
    assert isinstance(parts[0], OtherPart)
    assert readable_parts(parts, "x", [], NO_IMAGES, is_asked=True) == []


def test_types_of_parts_and_of_other_things() -> None:
    parts = (
        "text input_text output_text refusal input_image image_url input_audio input_file video_url computer_screenshot"
    )
    assert all(map(is_part, parts.split()))
    others = (
        "message image_generation_call file_search_call computer_call computer_call_output mcp_call thinking reasoning"
    )
    assert not any(map(is_part, others.split()))
