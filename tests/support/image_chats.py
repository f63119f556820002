"""Prompts of tokens with images, for small models of `vision_models`, and what transformers needs to compute them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from inflight.config.vision import Grid, VisionSpec
from inflight.interface.images import ImageInput, ImagesPart
from tests.support.vision_models import draw_image, places_of_patches

_CONTRAST = 4.0  # so that another image gives other tokens


class Chat(NamedTuple):
    tokens: list[int]
    images: list[ImageInput]

    def part(self, spec: VisionSpec) -> ImagesPart:
        return ImagesPart(images=tuple(self.images), position_merge=spec.position_merge)


def make_chat(pieces: Sequence[int | tuple[int, Grid]], spec: VisionSpec) -> Chat:
    """`pieces`: tokens of text, and images as their seed and grid."""
    tokens: list[int] = []
    images = []
    for piece in pieces:
        if isinstance(piece, int):
            tokens.append(piece)
            continue
        seed, grid = piece
        pixels = (_CONTRAST * draw_image(spec, grid, abs(seed))).numpy()
        if seed < 0:  # one pixel differs from the image of the positive number
            pixels.reshape(-1)[0] *= -40
        digest = hashlib.sha256(pixels.tobytes() + bytes(grid)).digest()
        count = spec.num_tokens(grid)
        images.append(ImageInput(start=len(tokens), num_tokens=count, digest=digest, pixels=pixels, grid=grid))
        tokens += [spec.image_token_id] * count
    return Chat(tokens, images)


def reference_inputs(model: Any, tokens: Sequence[int], images: Sequence[ImageInput]) -> dict[str, torch.Tensor]:
    """The arguments of a model of transformers. `tokens`: of the prompt, and those of the answer that are known. Any: each
    family has a class of its own."""
    found = {"input_ids": torch.tensor([list(tokens)])}
    if not images:
        return found
    pixels = [torch.from_numpy(image.pixels) for image in images]
    is_of_image = torch.zeros(1, len(tokens), dtype=torch.int32)
    for image in images:
        is_of_image[0, image.start : image.stop] = 1
    if model.config.model_type == "gemma3":
        return {**found, "pixel_values": torch.stack(pixels), "token_type_ids": is_of_image}
    if model.config.model_type == "gemma4":
        places = [places_of_patches(image.grid) for image in images]
        return {
            **found,
            "pixel_values": pad_sequence(pixels, batch_first=True),
            "image_position_ids": pad_sequence(places, batch_first=True, padding_value=-1),
            "mm_token_type_ids": is_of_image,
        }
    if pixels[0].dim() == 3:
        return {**found, "pixel_values": torch.stack(pixels)[None]}
    return {
        **found,
        "pixel_values": torch.cat(pixels),
        "image_grid_thw": torch.tensor([image.grid for image in images]),
        "mm_token_type_ids": is_of_image,
    }
