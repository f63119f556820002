"""Reads what a prompt says about its images: `multi_modal_data`, `multi_modal_uuids` and `mm_processor_kwargs`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from inflight.errors import InvalidRequestError
from inflight.multimodal.places import IMAGES, OPTIONS, image_place, uuid_place
from inflight.multimodal.settings import ImageSettings
from inflight.multimodal.source import Source, check_source

MAX_UUID_LENGTH = 256


class ImagesOfPrompt(TypedDict, total=False):
    """What the dictionary of a prompt may have about images.

    Attributes:
        multi_modal_data: {"image": an image or several}. The text of the prompt has a placeholder for each.
        multi_modal_uuids: {"image": a uuid for each image, or None}. An image that was sent before with a uuid may be None.
        mm_processor_kwargs: arguments of the model's image processor.
    """

    multi_modal_data: Mapping[str, Any]  # Any: see `check_source`
    multi_modal_uuids: Mapping[str, Any]
    mm_processor_kwargs: Mapping[str, Any]  # Any: JSON


@dataclass(frozen=True, slots=True)
class GivenImage:
    """An image of a prompt. `source` is None if the client has sent it before, with this uuid."""

    source: Source | None
    uuid: str | None


def has_images(prompt: object) -> bool:
    """Whether a prompt brings images."""
    return isinstance(prompt, Mapping) and bool(_images_of(prompt))


def read_images(prompt: Mapping[str, object], settings: ImageSettings) -> tuple[list[GivenImage], dict[str, Any]]:
    """Returns the images of a prompt, and the options of the processor. Reads no file and no URL.

    Raises:
        InvalidRequestError: there are too many images, or one has a wrong form.
    """
    sources = _images_of(prompt)
    if len(sources) > settings.max_images:
        raise InvalidRequestError(
            f"the prompt has {len(sources)} images; at most {settings.max_images} are allowed (--limit-mm-per-prompt)",
            IMAGES,
        )
    uuids = _uuids_of(prompt, len(sources))
    given = []
    for index, (source, uuid) in enumerate(zip(sources, uuids, strict=True)):
        if source is None and uuid is None:
            raise InvalidRequestError(
                "an image is None; give the image, or the uuid of one that was sent before", image_place(index)
            )
        try:
            given.append(GivenImage(None if source is None else check_source(source, settings), uuid))
        except InvalidRequestError as error:
            error.param = image_place(index)
            raise
    return given, _options_of(prompt, settings)


def _images_of(prompt: Mapping[str, object]) -> Sequence[object]:
    data = prompt.get("multi_modal_data")
    if data is None:
        data = {}
    if not isinstance(data, Mapping):
        raise InvalidRequestError(
            f"multi_modal_data is a {type(data).__name__}; give {{'image': image}}", "multi_modal_data"
        )
    if others := sorted(str(key) for key in data if key != "image"):
        raise InvalidRequestError(f"multi_modal_data has {others[0]!r}; only 'image' is supported", "multi_modal_data")
    if "image" not in data:
        return ()
    images = data["image"]
    return images if isinstance(images, list | tuple) else [images]


def _uuids_of(prompt: Mapping[str, object], num_images: int) -> Sequence[str | None]:
    given = prompt.get("multi_modal_uuids")
    if given is None:
        return [None] * num_images
    if not isinstance(given, Mapping) or given.keys() - {"image"}:
        raise InvalidRequestError("multi_modal_uuids must be {'image': uuids}", "multi_modal_uuids")
    uuids = given.get("image")
    uuids = [None] * num_images if uuids is None else [uuids] if isinstance(uuids, str) else uuids
    if not isinstance(uuids, list | tuple) or len(uuids) != num_images:
        raise InvalidRequestError(
            f"multi_modal_uuids must have a list with one uuid, or None, for each of the {num_images} images",
            "multi_modal_uuids",
        )
    for index, uuid in enumerate(uuids):
        if uuid is not None and (not isinstance(uuid, str) or not 0 < len(uuid) <= MAX_UUID_LENGTH):
            raise InvalidRequestError(f"a uuid must be a text of 1 to {MAX_UUID_LENGTH} characters", uuid_place(index))
    return uuids


def _options_of(prompt: Mapping[str, object], settings: ImageSettings) -> dict[str, Any]:
    given = prompt.get("mm_processor_kwargs")
    if given is None:
        given = {}
    try:
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise TypeError
        options = {**settings.options, **given}
        json.dumps(options, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise InvalidRequestError(
            "mm_processor_kwargs must be a dictionary of names and JSON values, such as {'max_pixels': 602112}", OPTIONS
        ) from None
    return options
