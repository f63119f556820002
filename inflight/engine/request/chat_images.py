"""Images in the messages of a chat in Python (`LLM.chat`): finds them, and puts numbered parts in their places."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inflight.errors import InvalidRequestError

Messages = Sequence[Mapping[str, Any]]  # Any: JSON, and images; not checked yet
# type of a part -> its member with the image
_MEMBERS = {"image_url": "image_url", "input_image": "image_url", "image_pil": "image_pil", "image": "image"}


@dataclass(frozen=True, slots=True)
class ChatImage:
    """
    Attributes:
        source: a URL, an image of Pillow, an array, the bytes of a file, or a pathlib.Path; None for an image that was sent
            before, with its uuid.
        place: where it is in the messages, for errors.
    """

    source: object
    uuid: str | None
    place: str


def take_images(messages: Messages) -> tuple[Messages, list[ChatImage]]:
    """Returns the messages with parts {"type": "image", "number": N}, and the images by these numbers. What is no message, and
    no part of an image, stays as it is.

    A part is {"type": "image_url", "image_url": URL or {"url": URL}}, {"type": "image_pil", "image_pil": image} or
    {"type": "image", "image": image}. Each may have a "uuid".

    Raises:
        InvalidRequestError: a part has no image.
    """
    images: list[ChatImage] = []
    given: object = messages  # the chat template refuses what is no list of messages
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        return messages, images
    return [_take(message, f"messages[{i}]", images) for i, message in enumerate(messages)], images


def _take(message: Mapping[str, Any], where: str, images: list[ChatImage]) -> Mapping[str, Any]:
    given: object = message
    content = given.get("content") if isinstance(given, Mapping) else None
    if not isinstance(content, list | tuple) or not any(map(_is_image, content)):
        return message
    parts = [
        _numbered(part, f"{where}['content'][{i}]", images) if _is_image(part) else part
        for i, part in enumerate(content)
    ]
    return {**message, "content": parts}


def _is_image(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _MEMBERS


def _numbered(part: Mapping[str, Any], where: str, images: list[ChatImage]) -> dict[str, Any]:
    member = _MEMBERS[part["type"]]
    source, uuid = part.get(member), part.get("uuid")
    if member == "image_url" and isinstance(source, Mapping):
        source = source.get("url")
    if source is None and uuid is None:
        raise InvalidRequestError(f"{where} is of type {part['type']!r} and has no image: give it in {member!r}", where)
    images.append(ChatImage(source, uuid, where))
    return {"type": "image", "number": len(images) - 1}
