"""Placeholders of a prompt become the tokens of its images."""

from __future__ import annotations

import pytest

from inflight.errors import InvalidRequestError
from inflight.multimodal.expansion import expand_text, expand_tokens
from inflight.multimodal.processed import ProcessedImage
from tests.support.expanded_images import encode, image_of


def test_each_placeholder_becomes_the_expansion_of_its_image() -> None:
    images = [image_of(2), image_of(1, 3)]
    text = expand_text("a@b@", images)
    assert text == "a[@@]b[@|@@@]"
    assert expand_tokens(encode("a@b@"), images, encode) == encode(text)


@pytest.mark.parametrize("text", ["", "@", "a@b@c@"])
def test_a_wrong_number_of_placeholders_is_refused(text: str) -> None:
    images = [image_of(2), image_of(3)]
    for expand in (lambda: expand_text(text, images), lambda: expand_tokens(encode(text), images, encode)):
        with pytest.raises(InvalidRequestError) as error:
            expand()
        assert error.value.param == "multi_modal_data['image']"


def test_images_behind_each_other_share_the_border_of_their_expansions() -> None:
    """As Idefics2's processor in transformers writes them."""
    image = ProcessedImage(placeholder="@", expansion="|##|", inputs=(), border="|")
    assert expand_text("@@ a@b", [image] * 3) == "|##|##| a|##| b"
    assert expand_text("@, @<x>@", [image] * 3) == "|##| , |##|<x>|##|"
