"""The images of a rendered chat, as the engine takes them, and the fields of the request that its errors are about."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from inflight.engine.request.prompt import TextPrompt
from inflight.entrypoints.fields.field_error import FieldError
from inflight.entrypoints.fields.images import ImageSource
from inflight.errors import InvalidRequestError
from inflight.tokenizer.chat_template import RenderedChat


def prompt_with_images(
    chat: RenderedChat, sources: Sequence[ImageSource], processor_options: Mapping[str, Any]
) -> TextPrompt:
    """The prompt for the engine. `sources`: the images of the request, by their numbers."""
    images = [sources[number] for number in chat.images]
    return {
        "prompt": chat.text,
        "multi_modal_data": {"image": [image.url for image in images]},
        "multi_modal_uuids": {"image": [image.uuid for image in images]},
        "multi_modal_places": [image.where for image in images],
        "mm_processor_kwargs": processor_options,
    }


@contextmanager
def fields_of_images(sources: Sequence[ImageSource]) -> Iterator[None]:
    """
    Raises:
        FieldError: instead of an error of the engine about an image, which names the field of the request already.
        InvalidRequestError: instead of one about all images. It names the messages.
    """
    try:
        yield
    except InvalidRequestError as error:
        if any(error.param == source.where for source in sources):
            raise FieldError(error.param, str(error)) from error
        if error.param.startswith("multi_modal_"):
            error.param = "messages"
        raise
