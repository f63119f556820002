"""`ImageSupport`: what a front end needs for prompts with images. `make_image_support`: the one of a model.

Only the table here knows inflight/multimodal/. Without its row, and with models for text, prompts with images are refused."""

import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from inflight.config.engine import EngineConfig, ModelConfig
from inflight.config.engine_args import EngineArgs
from inflight.config.families import VISION_FAMILIES
from inflight.config.families.transformers_vision import TYPES
from inflight.errors import InvalidRequestError
from inflight.hub import read_config
from inflight.interface.image_prompts import IMAGES, ImageTotals, has_images
from inflight.interface.parts import RequestPart
from inflight.interface.request import Int32Array
from inflight.tokenizer.tokenizer import Tokenizer

# what prepares images -> the function that makes it. It is imported if a model takes images
KINDS = {"images": "inflight.multimodal.start:make_image_prompts"}
TAKES_NONE = "this model takes no images"

logger = logging.getLogger(__name__)


class ImageSupport(Protocol):
    """Several threads may call all methods. A prompt without images is returned as it is."""

    async def prepared(self, prompt: Any, cache_salt: str, client: str = "") -> Any:  # Any: a prompt of any form
        """Returns the prompt with processed images. `cache_salt`: of a prompt that has none of its own. `client`: whose images
        they are; clients take turns.

        Raises:
            InvalidRequestError: an image is wrong, or the model takes none. `param` names the image.
            EngineError: images cannot be processed here.
            OverloadedError: too many images wait, and the most of them are this client's.
        """

    def prepared_now(self, prompt: Any, cache_salt: str) -> Any:  # Any: as above
        """As `prepared`. This thread waits for the images, unless they are processed already."""

    def processed(self, prompt: object, cache_salt: str) -> Any:  # Any: a tuple of images, for the methods below
        """Returns the processed images of a prompt. If it is not prepared yet, this thread waits for them.

        Raises: as `prepared`.
        """

    def expanded(self, given: Any, images: Any) -> Any:  # Any: a text or token ids
        """Returns the text or the token ids of a prompt with the expansions of its images."""

    def parts(self, token_ids: Int32Array, images: Any, given: Sequence[RequestPart]) -> tuple[RequestPart, ...]:
        """Returns the parts of the request: those that are given, and that of its images.

        Raises:
            InvalidRequestError: the tokens that stand for images are not those of the images.
        """

    def totals(self) -> ImageTotals | None:
        """What was done with images so far; None if the model takes none."""

    def close(self) -> None:
        """End what processes images. Idempotent."""


class NoImages(ImageSupport):
    """Refuses prompts with images. `refusal`: why."""

    def __init__(self, refusal: str = TAKES_NONE) -> None:
        self._refusal = refusal

    async def prepared(self, prompt: Any, cache_salt: str, client: str = "") -> Any:  # Any: a prompt of any form
        return self.prepared_now(prompt, cache_salt)

    def prepared_now(self, prompt: Any, cache_salt: str) -> Any:  # Any: as above
        self.processed(prompt, cache_salt)
        return prompt

    def processed(self, prompt: object, cache_salt: str) -> tuple[()]:
        if has_images(prompt):
            raise InvalidRequestError(f"{self._refusal}; leave them out", IMAGES)
        return ()

    def expanded(self, given: Any, images: Any) -> Any:  # Any: a text or token ids
        return given

    def parts(self, token_ids: Int32Array, images: Any, given: Sequence[RequestPart]) -> tuple[RequestPart, ...]:
        return tuple(given)

    def totals(self) -> None:
        return None

    def close(self) -> None:
        pass


def make_image_support(args: EngineArgs, config: EngineConfig, tokenizer: Tokenizer | None) -> ImageSupport:
    """
    Raises:
        ConfigError: an environment variable is wrong.
    """
    if config.model.architecture.vision is None:
        refusal = unread_images(config.model)
        if not refusal or args.language_model_only:
            return NoImages()
        logger.warning("%s", refusal)
        return NoImages(refusal)
    if "images" not in KINDS:
        return NoImages("images are not read here, because the code for them is not installed")
    module, _, name = KINDS["images"].partition(":")
    make = getattr(importlib.import_module(module), name)
    return cast("Callable[..., ImageSupport]", make)(args, config, tokenizer)


def unread_images(model: ModelConfig) -> str:
    """Why Inflight reads no images with this model, although transformers does; "" for a model that reads only text."""
    if not model.folder.is_dir():
        return ""
    content = read_config(model.folder)
    if not content.get("vision_config"):
        return ""
    types = ", ".join(sorted([*(each.model_type for each in VISION_FAMILIES), *(each.model_type for each in TYPES)]))
    return (
        f"{TAKES_NONE}: Inflight has no tower for the type {content.get('model_type')} "
        f"({model.architecture.name}), so the model is served for text only; images are read with the types {types}"
    )
