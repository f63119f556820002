"""`images_part`: finds the tokens of a prompt that stand for its images."""

from collections.abc import Sequence

import numpy as np

from inflight.config.vision import VisionSpec, max_image_tokens
from inflight.errors import InvalidRequestError
from inflight.interface.images import ImageInput, ImagesPart
from inflight.interface.request import Int32Array
from inflight.multimodal.processed import ProcessedImage


def images_part(token_ids: Int32Array, images: Sequence[ProcessedImage], vision: VisionSpec) -> ImagesPart:
    """Returns what the request gets beside its tokens.

    Raises:
        InvalidRequestError: the tokens for images are not those of the expansions, or not as many as the tower's embeddings.
    """
    _check_inputs(images, vision)
    positions = np.flatnonzero(token_ids == vision.image_token_id)
    inputs, done = list[ImageInput](), 0
    for place, each in ((image.place, each) for image in images for each in image.inputs):
        expected = np.full(each.num_tokens, vision.image_token_id) if each.token_ids is None else each.token_ids
        placeholders = np.flatnonzero(np.equal(expected, vision.image_token_id))
        start = int(positions[done] - placeholders[0]) if done < len(positions) else -1
        if start < 0 or not np.array_equal(token_ids[start : start + each.num_tokens], expected):
            raise InvalidRequestError("the prompt contains tokens of images that are not those of its images", "prompt")
        done += len(placeholders)
        inputs.append(
            ImageInput(
                start=start,
                num_tokens=each.num_tokens,
                digest=each.digest,
                pixels=each.pixels,
                grid=each.grid,
                place=place,
            )
        )
    if done != len(positions):
        raise InvalidRequestError("the prompt contains tokens of images that are not those of its images", "prompt")
    return ImagesPart(images=tuple(inputs), position_merge=vision.position_merge)


def _check_inputs(images: Sequence[ProcessedImage], vision: VisionSpec) -> None:
    """Check that the tower makes as many embeddings as the prompt has tokens for them.

    Raises:
        InvalidRequestError: it does not, for example because of an option of the processor.
    """
    for image in images:
        for each in image.inputs:
            if each.num_tokens > (most := max_image_tokens(each.num_tokens)):
                raise InvalidRequestError(
                    f"{image.place}: the image needs {each.num_tokens} tokens; at most {most} are allowed: send a smaller one",
                    image.place,
                )
            if (problem := vision.grid_problem(each.grid)) is not None:
                raise InvalidRequestError(f"{image.place}: the model cannot read {problem}", image.place)
            if vision.num_tokens(each.grid) != each.num_tokens:
                raise InvalidRequestError(
                    f"{image.place}: the image has {each.num_tokens} tokens in the prompt, but the model makes "
                    f"{vision.num_tokens(each.grid)} embeddings of it",
                    image.place,
                )
