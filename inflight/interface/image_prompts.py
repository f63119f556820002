"""What a prompt says about its images: `ImagesOfPrompt`. Whose they are: `OWNER`. What was done with those of a front end:
`ImageTotals`. All that is known of images where inflight/multimodal/ is not."""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypedDict

from inflight.errors import InvalidRequestError

IMAGES = "multi_modal_data['image']"  # what errors call the images of a prompt (`InvalidRequestError.param`)

# The client whose uuids a request may use for its images: the digest of the API key of the request that this task answers; ""
# if the server has no keys, or there is none. Each server sets it.
OWNER: ContextVar[str] = ContextVar("inflight_owner_of_images", default="")


class ImagesOfPrompt(TypedDict, total=False):
    """What the dictionary of a prompt may have about images.

    Attributes:
        multi_modal_data: {"image": an image or several}. The text of the prompt has a placeholder for each.
        multi_modal_uuids: {"image": a uuid for each image, or None}. An image that was sent before with a uuid may be None.
        mm_processor_kwargs: arguments of the model's image processor.
        multi_modal_places: what errors call the images; by default multi_modal_data['image'][0] and so on.
    """

    multi_modal_data: Mapping[str, Any]  # Any: see `check_source` of inflight/multimodal/
    multi_modal_uuids: Mapping[str, Any]
    mm_processor_kwargs: Mapping[str, Any]  # Any: JSON
    multi_modal_places: Sequence[str]


@dataclass(frozen=True, slots=True)
class ImageTotals:
    """
    Attributes:
        num_queries: images that were looked for in the cache of processed images.
        num_hits: how many of them were found there, or were being processed for another request.
        num_processed: images that were decoded and processed.
        processing_seconds: how long this took, added up; without the time for which they waited.
        num_refused: images that could not be used: they are damaged, too large, forbidden or not there.
        num_overloaded: images for which there was no place in a queue.
    """

    num_queries: int = 0
    num_hits: int = 0
    num_processed: int = 0
    processing_seconds: float = 0.0
    num_refused: int = 0
    num_overloaded: int = 0


def has_images(prompt: object) -> bool:
    """Whether a prompt brings images."""
    return isinstance(prompt, Mapping) and bool(images_of(prompt))


def names_earlier_images(prompt: object) -> bool:
    """Whether an image of a prompt is only named, by the uuid of one that was given before."""
    return isinstance(prompt, Mapping) and any(image is None for image in images_of(prompt))


def images_of(prompt: Mapping[str, object]) -> Sequence[object]:
    """The images of a prompt, in any form.

    Raises:
        InvalidRequestError: `multi_modal_data` has another form.
    """
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
