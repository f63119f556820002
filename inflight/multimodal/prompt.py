"""Reads what a prompt says about its images: `multi_modal_data`, `multi_modal_uuids` and `mm_processor_kwargs`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inflight.errors import InvalidRequestError
from inflight.interface.image_prompts import IMAGES, images_of
from inflight.multimodal.places import OPTIONS, image_place, uuid_place
from inflight.multimodal.settings import ImageSettings
from inflight.multimodal.source import Source, check_source

MAX_UUID_LENGTH = 256


@dataclass(frozen=True, slots=True)
class GivenImage:
    """An image of a prompt. `source` is None if the client has sent it before, with this uuid. `place` is what errors call it,
    or its uuid if it has only that."""

    source: Source | None
    uuid: str | None
    place: str


def read_images(prompt: Mapping[str, object], settings: ImageSettings) -> tuple[list[GivenImage], dict[str, Any]]:
    """Returns the images of a prompt, and the options of the processor. Reads no file and no URL.

    Raises:
        InvalidRequestError: there are too many images, or one has a wrong form.
    """
    sources = images_of(prompt)
    if len(sources) > settings.max_images:
        raise InvalidRequestError(
            f"the prompt has {len(sources)} images; at most {settings.max_images} are allowed (--limit-mm-per-prompt)",
            IMAGES,
        )
    places, uuid_places = _places_of(prompt, len(sources))
    uuids = _uuids_of(prompt, uuid_places)
    given = []
    for source, uuid, place, place_of_uuid in zip(sources, uuids, places, uuid_places, strict=True):
        if source is None:
            if uuid is None:
                problem = "the image is None; give the image, or the uuid of one that was sent before"
                raise InvalidRequestError(f"{place}: {problem}", place)
            given.append(GivenImage(None, uuid, place_of_uuid))
            continue
        try:
            given.append(GivenImage(check_source(source, settings), uuid, place))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{place}: {error}", place) from error
    return given, _options_of(prompt, settings)


def _places_of(prompt: Mapping[str, object], num_images: int) -> tuple[Sequence[str], Sequence[str]]:
    """What errors call the images, and their uuids."""
    given = prompt.get("multi_modal_places")
    if given is None:
        numbers = range(num_images)
        return [image_place(number) for number in numbers], [uuid_place(number) for number in numbers]
    if (
        not isinstance(given, list | tuple)
        or len(given) != num_images
        or not all(isinstance(each, str) for each in given)
    ):
        raise InvalidRequestError(
            f"multi_modal_places must be a list with a text for each of the {num_images} images", "multi_modal_places"
        )
    return given, given


def _uuids_of(prompt: Mapping[str, object], places: Sequence[str]) -> Sequence[str | None]:
    given = prompt.get("multi_modal_uuids")
    num_images = len(places)
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
    for place, uuid in zip(places, uuids, strict=True):
        if uuid is not None and (not isinstance(uuid, str) or not 0 < len(uuid) <= MAX_UUID_LENGTH):
            problem = f"a uuid must be a text of 1 to {MAX_UUID_LENGTH} characters"
            raise InvalidRequestError(f"{place}: {problem}", place)
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
