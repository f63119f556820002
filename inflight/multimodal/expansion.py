"""Expands the placeholders of a prompt: each becomes the text, or the tokens, that stand for its image."""

from collections.abc import Callable, Sequence

from inflight.errors import InvalidRequestError
from inflight.interface.image_prompts import IMAGES
from inflight.multimodal.processed import ProcessedImage


def expand_text(text: str, images: Sequence[ProcessedImage]) -> str:
    """Replace each placeholder of a text by the expansion of its image.

    Raises:
        InvalidRequestError: there are not as many placeholders as images.
    """
    placeholder = images[0].placeholder
    pieces = text.split(placeholder)
    _check_count(len(pieces) - 1, len(images), placeholder)
    texts = [pieces[0]]
    for image, piece in zip(images, pieces[1:], strict=True):
        border = image.border
        is_behind_image = bool(border) and texts[-1] == ""
        texts.append(image.expansion.removeprefix(border) if is_behind_image and len(texts) > 1 else image.expansion)
        texts.append(f" {piece}" if border and piece and not piece[0].isspace() and piece[0] != "<" else piece)
    return "".join(texts)


def expand_tokens(
    token_ids: Sequence[int], images: Sequence[ProcessedImage], encode: Callable[[str], list[int]]
) -> list[int]:
    """Replace each placeholder of a prompt that is given as token ids. `encode`: tokenises without special tokens.

    Raises:
        InvalidRequestError: there are not as many placeholders as images.
    """
    placeholder = images[0].placeholder
    [token_id] = encode(placeholder)
    places = [place for place, each in enumerate(token_ids) if each == token_id]
    _check_count(len(places), len(images), placeholder)
    expanded, done = list[int](), 0
    for image, place in zip(images, places, strict=True):
        expanded += [*token_ids[done:place], *encode(image.expansion)]
        done = place + 1
    return [*expanded, *token_ids[done:]]


def _check_count(num_places: int, num_images: int, placeholder: str) -> None:
    if num_places != num_images:
        raise InvalidRequestError(
            f"the prompt has {num_places} placeholders {placeholder!r} for {num_images} images; it needs one for each image, "
            "and a user's text must not contain it",
            IMAGES,
        )
