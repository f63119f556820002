"""Prompts with images, and which field an error about one of them names."""

from __future__ import annotations

import pytest

from inflight.entrypoints.fields.images import ImageSource
from inflight.entrypoints.http.prompt_images import fields_of_images, prompt_with_images
from inflight.errors import InvalidRequestError
from inflight.tokenizer.chat_template import RenderedChat
from tests.unit.entrypoints.refusals import refused

SOURCES = [
    ImageSource(url="data:,a", where="messages[0].content[0].image_url.url"),
    ImageSource(url=None, uuid="b", where="messages[1].content[0].uuid"),
    ImageSource(url="data:,c", uuid="c", where="messages[2].images[0]"),
]
CHAT = RenderedChat("<image> <image>", (2, 1), "<image>")


def test_images_come_in_the_order_of_the_prompt() -> None:
    assert prompt_with_images(CHAT, SOURCES, {"max_pixels": 9}) == {
        "prompt": "<image> <image>",
        "multi_modal_data": {"image": ["data:,c", None]},
        "multi_modal_uuids": {"image": ["c", "b"]},
        "multi_modal_places": ["messages[2].images[0]", "messages[1].content[0].uuid"],
        "mm_processor_kwargs": {"max_pixels": 9},
    }


@pytest.mark.parametrize("field", ["messages[2].images[0]", "messages[1].content[0].uuid"])
def test_an_error_of_an_image_is_one_of_its_field(field: str) -> None:
    with refused(field), fields_of_images(SOURCES):
        raise InvalidRequestError(f"{field}: there is no image behind this URL", field)


@pytest.mark.parametrize(
    ("param", "found"),
    [("multi_modal_data['image']", "messages"), ("prompt", "prompt"), ("mm_processor_kwargs", "mm_processor_kwargs")],
)
def test_other_errors_are_about_the_messages_or_stay_as_they_are(param: str, found: str) -> None:
    with pytest.raises(InvalidRequestError) as raised, fields_of_images(SOURCES):
        raise InvalidRequestError("too many images", param)
    assert raised.value.param == found
