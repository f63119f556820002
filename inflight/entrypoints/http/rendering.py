"""Turns the messages of a chat into the token ids of a prompt, off the event loop."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from inflight.entrypoints.fields.field_error import FieldError
from inflight.entrypoints.http.chat_request import ChatPrompt
from inflight.entrypoints.http.prompt_images import fields_of_images, prompt_with_images
from inflight.entrypoints.http.server import ApiServer
from inflight.entrypoints.http.validated import TokenPrompt
from inflight.errors import InvalidRequestError
from inflight.tokenizer.chat_template import RenderedChat

_KEY = re.compile(r"\['(\w+)'\]")
_MESSAGE = re.compile(r"messages\[(\d+)\]")  # the beginning of a place in a message, as the chat template names it


async def render_messages(
    server: ApiServer, prompt: ChatPrompt, *, cache_salt: str = "", behind: bool = False
) -> TokenPrompt:
    """Returns the prompt's tokens. `behind`: it may wait for the prompts of requests.

    Raises:
        FieldError: an image cannot be read, or may not be.
        InvalidRequestError: as `render_text`.
    """
    rendered = await render_text(server, prompt)
    adds_special_tokens = prompt.add_special_tokens
    if not rendered.images:
        encoding = server.engine.encode(rendered.text, add_special_tokens=adds_special_tokens, behind=behind)
        return TokenPrompt(await encoding)
    given = prompt_with_images(rendered, prompt.images, prompt.processor_options)
    with fields_of_images(prompt.images):
        prepared = await server.engine.prepare(given, add_special_tokens=adds_special_tokens, cache_salt=cache_salt)
    return TokenPrompt(prepared.token_ids, prepared=prepared)


async def render_text(server: ApiServer, prompt: ChatPrompt) -> RenderedChat:
    """Returns what the chat template makes of the messages.

    Raises:
        FieldError: a message is wrong. Its field is one of `prompt.places`.
        InvalidRequestError: the template refuses the messages, or the engine has no tokenizer.
    """
    engine = server.engine
    template = server.engine.chat_template
    if template is None:
        raise InvalidRequestError(
            "messages need a tokenizer, but the engine runs without one: send a prompt of token ids to /v1/completions",
            "messages",
        )
    opens = prompt.add_generation_prompt
    arguments: dict[str, Any] = {  # Any: JSON
        "tools": prompt.tools or None,
        "documents": prompt.documents,
        "add_generation_prompt": not prompt.continue_final_message if opens is None else opens,
        "continue_final_message": prompt.continue_final_message,
        "chat_template_kwargs": {**(server.settings.default_chat_template_kwargs or {}), **prompt.variables},
    }

    def render() -> RenderedChat:
        return template.render_chat(prompt.messages, **arguments)

    with _fields_of_messages(prompt.places):
        return await engine.render(render)


@contextmanager
def _fields_of_messages(places: Sequence[str]) -> Iterator[None]:
    """
    Raises:
        FieldError: instead of an error about a message. It names the field of the request that has the message.
    """
    try:
        yield
    except InvalidRequestError as error:
        found = _MESSAGE.match(error.param)
        if found is None:
            raise
        place = places[int(found[1])] if places else _KEY.sub(r".\1", error.param)
        message = str(error)
        if message.startswith(error.param):
            message = place + message.removeprefix(error.param)
        raise FieldError(place, message) from error


def truncated(prompt: TokenPrompt, wanted: int | None, max_model_len: int) -> TokenPrompt:
    """Returns the part of a prompt that `truncate_prompt_tokens` keeps, which is its end.

    Raises:
        InvalidRequestError: nothing would be left, or the prompt has images and would be cut.
    """
    if wanted is None:
        return prompt
    if wanted == 0:
        raise InvalidRequestError(
            "truncate_prompt_tokens=0 leaves no prompt; give at least 1, or -1", "truncate_prompt_tokens"
        )
    kept = prompt.token_ids[-(max_model_len - 1 if wanted == -1 else wanted) :]
    if len(kept) == len(prompt.token_ids):
        return prompt
    if prompt.prepared is not None:
        raise InvalidRequestError(
            f"truncate_prompt_tokens={wanted} would cut a prompt of {len(prompt.token_ids)} tokens that has images, and an "
            "image cannot be cut: leave out older messages instead",
            "truncate_prompt_tokens",
        )
    return TokenPrompt(kept, prompt.text)
