"""The content parts of messages: text, thoughts, images, and other parts, which the model cannot read. A model that takes no
images cannot read these either.

Other parts do not end a conversation. A part of a type that the server does not know is left out. A medium, such as an image,
is replaced by a short text, so that the model knows that there was one. Both are reported. A medium is an error only in
the messages that have no answer yet, because the client asks about it now. In the result of a tool it is never an error: the
model has called the tool, so the client has not chosen to send a medium.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from inflight.entrypoints.fields.field_error import FieldError
from inflight.entrypoints.fields.images import (
    URL_TYPES,
    ImagePart,
    OtherPart,
    PlacedImage,
    RequestImages,
    refuse_without_image,
)
from inflight.entrypoints.fields.strict_model import StrictModel, no_effect, without_indices

_MEDIA = (
    "image",
    "screenshot",
    "audio",
    "video",
    "file",
    "document",
    "container_upload",
)  # words in the names of types
_IMAGES = ("image", "screenshot")
_HOW_TO_SEND = (
    "an image is read in parts of the type image_url (chats) or input_image (Responses) with a URL, and in blocks of the type "
    "image with a source of the type base64 or url (Messages)"
)
_TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}  # type -> field with the text
_THINKING = "thinking"
_MEDIUM_TYPE = re.compile(r"((input|output|computer)_)?(image|screenshot|audio|video|file|document)(_url)?")


def _check_part_type(kind: object) -> object:
    if isinstance(kind, str) and kind != "text":
        raise PydanticCustomError(
            "part_type", f"a part of the type {kind!r} needs a text in {_TEXTS.get(kind, kind)!r}"
        )
    return kind


def as_text_part(part: object) -> object:
    """Converts parts of other kinds that are text: a refusal, which is the text with which another model has refused to answer,
    and the parts of OpenAI's Responses API."""
    kind = part.get("type") if isinstance(part, dict) else None
    key = _TEXTS.get(kind) if isinstance(kind, str) and kind != "text" else None
    if key is not None and isinstance(part, dict) and isinstance(part.get(key), str):
        return {"type": "text", "text": part[key]}
    return part


class TextPart(StrictModel):
    type: Annotated[Literal["text"], BeforeValidator(_check_part_type)]
    text: str


class ThinkingPart(StrictModel):
    type: Literal["thinking"]
    thinking: str | list[TextPart] = Field(description="A thought of the assistant, as text or as parts.")
    closed: bool | None = no_effect("From other models.")
    signature: str | None = no_effect("From other models.")


def _kind_of_part(part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    if kind in URL_TYPES:
        return "image"
    if isinstance(part, OtherPart) or (isinstance(kind, str) and kind != _THINKING and kind not in _TEXTS):
        return "other part"
    thought = part.get("thinking") if isinstance(part, dict) and kind == _THINKING else None
    is_thought = isinstance(part, ThinkingPart) or isinstance(thought, str | list)
    return "part with a thought" if is_thought else "part with text"


def _kind_without_thoughts(part: object) -> str:
    kind = _kind_of_part(part)
    return "other part" if kind == "part with a thought" else kind


ContentPart = Annotated[
    Annotated[TextPart, Tag("part with text")]
    | Annotated[ThinkingPart, Tag("part with a thought")]
    | Annotated[ImagePart, Tag("image")]
    | Annotated[OtherPart, Tag("other part")],
    Discriminator(_kind_of_part),
    BeforeValidator(as_text_part),
]
# where thoughts are no parts of messages
PlainPart = Annotated[
    Annotated[TextPart, Tag("part with text")]
    | Annotated[ImagePart, Tag("image")]
    | Annotated[OtherPart, Tag("other part")],
    Discriminator(_kind_without_thoughts),
    BeforeValidator(as_text_part),
]


def readable_parts(
    parts: Sequence[TextPart | ThinkingPart | OtherPart],
    where: str,
    left_out: list[str],
    images: RequestImages,
    *,
    is_asked: bool,
) -> list[TextPart | ThinkingPart | OtherPart]:
    """The parts that the model can read: none of them is an `OtherPart`, except for a `PlacedImage` for each image.

    Args:
        where: the field of the request that has the parts.
        left_out: gets the names of the parts that the model cannot read, for the answer's header.
        images: gets the images, if the model takes them.
        is_asked: whether the client asks about these parts now.

    Raises:
        FieldError: a part is a medium that the model cannot read, and the client asks about it now.
    """
    found: list[TextPart | ThinkingPart | OtherPart] = []
    for i, part in enumerate(parts):
        if not isinstance(part, OtherPart) or isinstance(part, PlacedImage):
            found.append(part)
            continue
        if images.are_read and isinstance(part, ImagePart):
            if part.has_image:
                found.append(images.add_part(part, f"{where}[{i}]"))
                continue
            if is_asked:
                refuse_without_image(part, f"{where}[{i}]")
        if is_asked:
            check_medium(part.type, f"{where}[{i}].type", images)
        left_out.append(f"{without_indices(where)}[] ({part.type})")
        if text := text_instead(part.type, images):
            found.append(TextPart(type="text", text=text))
    return found


def is_part(kind: str) -> bool:
    """Whether this is the type of a part with a text or a medium, in the words of OpenAI's APIs."""
    return kind in _TEXTS or _MEDIUM_TYPE.fullmatch(kind) is not None


def check_medium(kind: str, where: str, images: RequestImages) -> None:
    """
    Raises:
        FieldError: a part of this type is a medium.
    """
    medium = _medium_of(kind)
    if medium is None:
        return
    if not images.are_read:
        takes = "this model takes no images, audio, video or files: it takes text only"
    elif medium in _IMAGES:
        takes = _HOW_TO_SEND
    else:
        takes = "this model takes no audio, video or files: it takes text and images"
    raise FieldError(where, f"{where}: {kind!r} is of type {medium}; {takes}")


def text_instead(kind: str, images: RequestImages) -> str:
    """What the model reads instead of a part of this type; "" if nothing."""
    medium = _medium_of(kind)
    if medium is None:
        return ""
    return f"[{medium}: left out, because this model {'cannot read it' if images.are_read else 'reads text only'}]"


def _medium_of(kind: str) -> str | None:
    """What a part of this type contains, such as "image"; None if it is no medium."""
    return next((medium for medium in _MEDIA if medium in kind), None)
