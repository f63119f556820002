"""The parts with images that `LLM.chat` takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inflight.engine.request.chat_images import take_images
from inflight.errors import InvalidRequestError

PIXELS = np.zeros((1, 1, 3), dtype=np.uint8)
TEXT = {"type": "text", "text": "?"}


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ({"type": "image_url", "image_url": {"url": "data:,"}}, "data:,"),
        ({"type": "image_url", "image_url": "data:,"}, "data:,"),
        ({"type": "input_image", "image_url": "data:,"}, "data:,"),
        ({"type": "image_pil", "image_pil": PIXELS}, PIXELS),
        ({"type": "image", "image": Path("a.png")}, Path("a.png")),
        ({"type": "image", "image": b"GIF"}, b"GIF"),
    ],
)
@pytest.mark.parametrize("uuid", [None, "u"])
def test_the_forms_of_a_part(part: dict[str, Any], source: object, uuid: str | None) -> None:
    given = [{"role": "system", "content": "s"}, {"role": "user", "content": (TEXT, {**part, "uuid": uuid}, part)}]
    messages, images = take_images(given)
    content = [TEXT, {"type": "image", "number": 0}, {"type": "image", "number": 1}]
    assert messages == [given[0], {"role": "user", "content": content}]
    assert [each.source is source or each.source == source for each in images] == [True, True]
    assert [each.uuid for each in images] == [uuid, None]
    assert [each.place for each in images] == ["messages[1]['content'][1]", "messages[1]['content'][2]"]


def test_an_image_that_was_sent_before() -> None:
    _, [image] = take_images([{"role": "user", "content": [{"type": "image_url", "image_url": None, "uuid": "u"}]}])
    assert (image.source, image.uuid) == (None, "u")


@pytest.mark.parametrize("part", [{"type": "image"}, {"type": "image_url", "image_url": {}}, {"type": "image_pil"}])
def test_a_part_without_an_image(part: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        take_images([{"role": "user", "content": [part]}])
    assert raised.value.param == "messages[0]['content'][0]"


@pytest.mark.parametrize(
    "given", ["text", None, 5, ["text"], [{"role": "user"}], [{"content": "text"}], [{"content": [5]}]]
)
def test_other_messages_stay_as_they_are(given: Any) -> None:
    assert take_images(given) == (given, [])
