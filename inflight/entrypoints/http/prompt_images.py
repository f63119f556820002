"""The images of a rendered chat, as the engine takes them, and the fields of the request that its errors are about."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from inflight.engine.request.prompt import TextPrompt
from inflight.entrypoints.fields.field_error import FieldError
from inflight.entrypoints.fields.images import ImageSource
from inflight.errors import InvalidRequestError
from inflight.tokenizer.chat_template import RenderedChat

# the engine's places of an image, or of its uuid: in the order of the prompt
_PLACE = re.compile(r"multi_modal_(?:data|uuids)\['image'\]\[(\d+)\]")


def prompt_with_images(
    chat: RenderedChat, sources: Sequence[ImageSource], processor_options: Mapping[str, Any]
) -> TextPrompt:
    """The prompt for the engine. `sources`: the images of the request, by their numbers."""
    images = [sources[number] for number in chat.images]
    return {
        "prompt": chat.text,
        "multi_modal_data": {"image": [image.url for image in images]},
        "multi_modal_uuids": {"image": [image.uuid for image in images]},
        "mm_processor_kwargs": processor_options,
    }


@contextmanager
def fields_of_images(chat: RenderedChat, sources: Sequence[ImageSource]) -> Iterator[None]:
    """
    Raises:
        FieldError: instead of an error of the engine about an image. It names the field of the request.
        InvalidRequestError: instead of one about all images. It names the messages.
    """
    try:
        yield
    except InvalidRequestError as error:
        if (found := _PLACE.match(error.param)) is None:
            if error.param.startswith("multi_modal_"):
                error.param = "messages"
            raise
        where = sources[chat.images[int(found[1])]].where
        message = str(error).removeprefix(found[0]).removeprefix(":").strip()
        raise FieldError(where, f"{where}: {message}") from error
