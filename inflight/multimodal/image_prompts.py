"""`ImagePrompts`: what an input processor has for prompts with images, if the model takes them.

prompt -> prepared: its images are processed -> its placeholders are expanded -> its tokens are checked -> ImagesPart
"""

from collections.abc import Mapping, Sequence
from typing import Any

from inflight.config.vision import VisionSpec
from inflight.errors import InvalidRequestError
from inflight.interface.image_prompts import IMAGES, OWNER, ImageTotals, has_images
from inflight.interface.images import ImagesPart
from inflight.interface.parts import RequestPart
from inflight.interface.request import Int32Array
from inflight.multimodal.cache import Scope
from inflight.multimodal.expansion import expand_text, expand_tokens
from inflight.multimodal.image_parts import images_part
from inflight.multimodal.images import Images
from inflight.multimodal.processed import ProcessedImage
from inflight.tokenizer.tokenizer import Tokenizer

Processed = tuple[ProcessedImage, ...]


class ImagePrompts:
    """An `ImageSupport`. Several threads may call all methods.

    Args:
        vision: the vision tower of the model.
        tokenizer: None if the engine has none. Then prompts cannot have images.
    """

    def __init__(self, images: Images, vision: VisionSpec, tokenizer: Tokenizer | None) -> None:
        self._images = images
        self._vision = vision
        self._tokenizer = tokenizer

    async def prepared(self, prompt: Any, cache_salt: str, client: str = "") -> Any:  # Any: a prompt of any form
        """Returns the prompt with processed images. `cache_salt`: of a prompt that has none of its own. `client`: whose images
        they are; clients take turns.

        Raises:
            InvalidRequestError: an image is wrong. `param` names the image (places.py).
            EngineError: images cannot be processed here.
            OverloadedError: too many images wait, and the most of them are this client's.
        """
        if not has_images(prompt) or _processed(prompt) is not None:
            return prompt
        return _with_images(prompt, await self._able().prepare(prompt, _scope_of(prompt, cache_salt), client))

    def prepared_now(self, prompt: Any, cache_salt: str) -> Any:  # Any: as above
        """As `prepared`. This thread waits for the images, unless they are processed already."""
        images = self.processed(prompt, cache_salt)
        return _with_images(prompt, images) if images else prompt

    def processed(self, prompt: object, cache_salt: str) -> Processed:
        """Returns the processed images of a prompt. If it is not prepared yet, this thread waits for them.

        Raises: as `prepared`.
        """
        if not has_images(prompt):
            return ()
        assert isinstance(prompt, Mapping)  # or it would have no images
        found = _processed(prompt)
        return self._able().prepare_now(prompt, _scope_of(prompt, cache_salt)) if found is None else found

    def expanded(self, given: Any, images: Processed) -> Any:  # Any: a text or token ids
        """Returns the text or the token ids of a prompt with the expansions of its images."""
        if not images or self._tokenizer is None:
            return given
        if isinstance(given, str):
            return expand_text(given, images)
        tokenizer = self._tokenizer
        return expand_tokens(list(given), images, lambda text: tokenizer.encode(text, False))

    def parts(self, token_ids: Int32Array, images: Processed, given: Sequence[RequestPart]) -> tuple[RequestPart, ...]:
        """Returns the parts of the request: those that are given, and that of its images.

        Raises:
            InvalidRequestError: the tokens that stand for images are not those of the images.
        """
        if any(isinstance(part, ImagesPart) for part in given):
            return tuple(given)
        part = images_part(token_ids, images, self._vision)
        return (*given, part) if images else tuple(given)

    def totals(self) -> ImageTotals:
        """What was done with images so far."""
        return self._images.counts.totals()

    def close(self) -> None:
        """End the processes. Idempotent."""
        self._images.close()

    def _able(self) -> Images:
        if self._tokenizer is None:
            raise InvalidRequestError(
                "images need a tokenizer, and the engine has none (skip_tokenizer_init=True)", IMAGES
            )
        return self._images


def _processed(prompt: Mapping[str, Any]) -> Processed | None:
    """The images of a prompt if it is prepared."""
    images = prompt["multi_modal_data"]["image"]
    if isinstance(images, tuple) and all(isinstance(each, ProcessedImage) for each in images):
        return images
    return None


def _with_images(prompt: Mapping[str, Any], images: Processed) -> dict[str, Any]:
    return {**prompt, "multi_modal_data": {"image": images}}


def _scope_of(prompt: Mapping[str, Any], cache_salt: str) -> Scope:
    return OWNER.get(), str(prompt.get("cache_salt", cache_salt))
