"""Images in messages, and how a chat template writes them.

An image is a part {"type": "image", "number": N} of a message's content. The caller keeps the sources of the images, and
`number` is the place of the source among them. In the prompt a short text stands for each image, such as <image>. Which text,
and in messages of which roles, is found by rendering invented conversations. Where a template writes no images, this text is
written at the place of the image, as a part of the message's text.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from inflight.errors import InvalidRequestError
from inflight.tokenizer.content_parts import FIRST, SECOND, is_written, rendered_with, text_part
from inflight.tokenizer.probes import Message, PerRole, Render

IMAGE = "image"
# in which forms templates know an image; the first that a template writes counts
_FORMS: tuple[Message, ...] = ({"type": IMAGE}, {"type": "image_url", "image_url": {"url": ""}})


class ImageParts:
    """Of one template.

    Args:
        token: the model's token for an image, as text. It stands for images if the template writes none; "" if the model has
            no such token.
    """

    def __init__(self, render: Render, token: str) -> None:
        self._render = render
        self._token = token
        self._takes = PerRole(lambda role: bool(self._written[1]) and self._counts(role, *self._written))

    @property
    def text(self) -> str:
        """What stands for an image in a prompt; "" if nothing can."""
        return self._written[1] or self._token

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts that nobody may write: they would be taken for an image."""
        return tuple(dict.fromkeys(filter(None, (self._written[1], self._token))))

    def takes(self, role: str) -> bool:
        """Whether the template writes images in messages of this role."""
        return self._takes(role)

    def complete(self, message: dict[str, Any]) -> dict[str, Any]:  # Any: JSON
        """The message, or a copy in which its images are in the form that the template writes, or texts.

        Raises:
            InvalidRequestError: neither the template nor the model has a text for an image.
        """
        content = message.get("content")
        if not isinstance(content, list) or not any(map(is_image, content)):
            return message
        form: Message = self._written[0] if self.takes(message["role"]) else text_part(self._checked_text())
        return {**message, "content": [{**form} if is_image(part) else part for part in content]}

    def _checked_text(self) -> str:
        if not self.text:
            raise InvalidRequestError(
                "the chat template writes no images, and the model has no token for one: give the engine a chat template for "
                "images, or leave the images out",
                "messages",
            )
        return self.text

    @cached_property
    def _written(self) -> tuple[Message, str]:
        """The form in which the template knows images, and what it writes for one; the text is "" if it writes none."""
        for form in _FORMS:
            found = self._inserted(form)
            for text in (found, self._token):
                if text and self._counts("user", form, text):
                    return form, text
        return _FORMS[0], ""

    def _inserted(self, form: Message) -> str:
        """What an image between two texts adds to the prompt."""
        plain = rendered_with(self._render, "user", [text_part(FIRST), text_part(SECOND)])
        prompt = rendered_with(self._render, "user", [text_part(FIRST), form, text_part(SECOND)])
        if not (is_written(plain) and is_written(prompt)):
            return ""
        between, usual = _between(prompt), _between(plain)
        if between == usual:  # some templates write all images before the texts
            between, usual = prompt[: prompt.index(FIRST)], plain[: plain.index(FIRST)]
        start = _num_equal(between, usual)
        end = _num_equal(between[start:][::-1], usual[start:][::-1])
        return between[start : len(between) - end].strip()

    def _counts(self, role: str, form: Message, text: str) -> bool:
        """Whether the template writes each of several images as this text."""
        texts = [text_part(FIRST), text_part(SECOND)]
        plain = rendered_with(self._render, role, texts)
        prompt = rendered_with(self._render, role, [form, texts[0], form, texts[1]])
        return is_written(prompt) and prompt.count(text) == plain.count(text) + 2


def is_image(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == IMAGE


def image_numbers(conversation: Sequence[Message]) -> list[int]:
    """The numbers of the images, in the order in which a template writes the messages."""
    return [
        part["number"]
        for message in conversation
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if is_image(part)
    ]


def check_texts(given: Mapping[str, Any], texts: Sequence[str]) -> None:
    """
    Args:
        given: what a template writes: its variables, by their names.
        texts: those that stand for images.

    Raises:
        InvalidRequestError: a text in `given` contains one of `texts`, so that it would be taken for an image.
    """
    for name, value in given.items():
        for where, text in _texts_in(value, name):
            if found := next((each for each in texts if each in text), None):
                raise InvalidRequestError(
                    f"{where} contains {found!r}, which stands for an image in the prompts of this model: write it differently",
                    where,
                )


def check_number(prompt: str, text: str, number: int) -> None:
    """
    Raises:
        InvalidRequestError: `text` does not stand `number` times in the prompt.
    """
    if (found := prompt.count(text)) != number:
        raise InvalidRequestError(
            f"the chat template writes {found} images, and the messages have {number}: give the engine another chat template, "
            "or put the images into messages of the user",
            "messages",
        )


def _between(prompt: str) -> str:
    return prompt[prompt.index(FIRST) + len(FIRST) : prompt.index(SECOND)]


def _num_equal(one: str, two: str) -> int:
    """How many characters at the beginning are equal."""
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def _texts_in(value: object, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, list):
        for i, each in enumerate(value):
            yield from _texts_in(each, f"{where}[{i}]")
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _texts_in(key, where)
            yield from _texts_in(each, f"{where}[{key!r}]")
