"""The images of a request: `RequestImages` collects them while an API reads its body.

A message gets a `PlacedImage` in the place of each image. It has the number of the image, and no data, so a chat template never
sees the data. The engine reads the sources when the template has written the messages, in the order in which it has written
them. Here nothing is decoded: base64 becomes a data: URL.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from inflight.entrypoints.fields.field_error import FieldError
from inflight.entrypoints.fields.strict_model import StrictModel, no_effect, optional

URL_TYPES = ("image_url", "input_image")  # types of parts with a URL: of a chat, and of the Responses API
# types of parts that have a text or a thought
TEXT_TYPES = ("text", "input_text", "output_text", "refusal", "thinking")


class OtherPart(StrictModel):
    """A part that is neither text, nor a thought, nor an image with a URL. It is left out, or replaced by a text that says what
    it was."""

    model_config = ConfigDict(extra="ignore")

    type: str = Field(max_length=256, json_schema_extra={"not": {"enum": [*TEXT_TYPES, *URL_TYPES]}})


class ImageUrl(StrictModel):
    model_config = ConfigDict(extra="ignore")

    url: str = Field(description="data:, or https:, http: or file: where the server allows it.")
    detail: str | None = no_effect("The processor of the model decides.")


def _readable_url(given: object) -> object:
    """None for what is no URL: the part has no image, which is an error only if the client asks about it now."""
    url = given.get("url") if isinstance(given, dict) else given
    return None if not isinstance(url, str | ImageUrl) else {"url": url} if isinstance(given, dict) else given


class ImagePart(OtherPart):
    """An image. If the model takes no images, it counts as a part of another type."""

    type: Literal["image_url", "input_image"]
    image_url: Annotated[str | ImageUrl | None, BeforeValidator(_readable_url)] = optional(
        "A URL. It may be left out for an image that was sent before, with its uuid."
    )
    uuid: str | None = optional(
        "A name by which later requests can send the image again without its data.", min_length=1, max_length=256
    )

    @property
    def has_image(self) -> bool:
        return self.image_url is not None or self.uuid is not None


class PlacedImage(OtherPart):
    """What a chat template gets instead of an image."""

    type: Literal["image"] = "image"
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSource:
    """
    Attributes:
        url: None for an image that was sent before, with its uuid.
        where: the field of the request, for errors.
    """

    url: str | None
    uuid: str | None = None
    where: str


class RequestImages:
    """
    Attributes:
        are_read: whether the model takes images.
        sources: those of the images so far. The number of an image is its place here.
    """

    def __init__(self, *, are_read: bool) -> None:
        self.are_read = are_read
        self.sources: list[ImageSource] = []

    def add(self, url: str | None, where: str, uuid: str | None = None) -> PlacedImage:
        self.sources.append(ImageSource(url=url, uuid=uuid, where=where))
        return PlacedImage(number=len(self.sources) - 1)

    def add_part(self, part: ImagePart, where: str) -> PlacedImage:
        if isinstance(part.image_url, ImageUrl):
            return self.add(part.image_url.url, f"{where}.image_url.url", part.uuid)
        return self.add(part.image_url, f"{where}.{'uuid' if part.image_url is None else 'image_url'}", part.uuid)

    def add_base64(self, data: str, where: str, media_type: str = "") -> PlacedImage:
        """`data` may have line breaks, which programs such as `base64` write, and may also be a data: URL."""
        if "\n" in data:
            data = data.replace("\r", "").replace("\n", "")
        return self.add(data if data.startswith("data:") else f"data:{media_type};base64,{data}", where)


def refuse_without_image(part: OtherPart, where: str) -> None:
    """
    Raises:
        FieldError: always. The part is of an image, and has none.
    """
    raise FieldError(
        where,
        f"{where}: a part of the type {part.type!r} without an image: give image_url with a URL, such as "
        "data:image/png;base64,... (the server stores no files)",
    )
