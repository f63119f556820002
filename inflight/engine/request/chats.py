"""`Chats`: renders conversations with the chat template, and finds in it how the model writes tool calls and reasoning."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, TypedDict, Unpack

from inflight.engine.request.chat_images import take_images
from inflight.engine.request.prompt import TextPrompt
from inflight.errors import InvalidRequestError
from inflight.parsers.selector import DetectedParsers, detect_parsers
from inflight.parsers.tool_choice import constrain_tools
from inflight.sampling_params import SamplingParams
from inflight.tokenizer.chat_template import ChatTemplate


class ChatOptions(TypedDict, total=False):
    """Options for rendering a conversation.

    Attributes:
        tools: functions that the model may call, as JSON schemas. Default: none.
        add_generation_prompt: whether to open the assistant's turn. Default: True.
        continue_final_message: whether the model continues the last message. Default: False.
        chat_template_kwargs: further variables for the template. Default: none.
    """

    tools: Sequence[Mapping[str, Any]] | None  # Any: JSON, checked by the chat template
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any] | None


class Chats:
    """Several threads may call all methods.

    Args:
        template: None if the engine has no tokenizer.
        default_params: used for a chat without `SamplingParams`.
    """

    def __init__(self, template: ChatTemplate | None, default_params: SamplingParams) -> None:
        self._template = template
        self._default_params = default_params

    @cached_property
    def parsers(self) -> DetectedParsers:
        """The parsers of tool calls and reasoning, found in the chat template."""
        return detect_parsers(self._template)

    def render_text(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> str:
        """Render a conversation without images with the model's chat template. The text contains the special tokens.

        Raises:
            InvalidRequestError: the messages are malformed, the template refuses them, or the engine has no tokenizer.
            TokenizerError: the model has no chat template.
        """
        if self._template is None:
            raise InvalidRequestError("chat needs a tokenizer, and the engine has none (skip_tokenizer_init=True)")
        return self._template.render(messages, **options)

    def prompt(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> TextPrompt:
        """Render a conversation as a prompt, which also has its images. Its text contains the special tokens, so it must be
        tokenised with add_special_tokens=False. Raises as `render_text`."""
        if self._template is None or not self._template.takes_images:
            return {"prompt": self.render_text(messages, **options)}
        numbered, images = take_images(messages)
        rendered = self._template.render_chat(numbered, **options)
        if not images:
            return {"prompt": rendered.text}
        shown = [images[number] for number in rendered.images]
        return {
            "prompt": rendered.text,
            "multi_modal_data": {"image": [image.source for image in shown]},
            "multi_modal_uuids": {"image": [image.uuid for image in shown]},
            "multi_modal_places": [image.place for image in shown],
        }

    def with_strict_tools(
        self, params: SamplingParams | None, tools: Sequence[Mapping[str, Any]] | None
    ) -> SamplingParams | None:
        """Returns `params` for a chat with these tools. If a tool is strict, the result has a grammar: calls of strict tools
        must match the schemas of these tools."""
        if not tools or self._template is None:
            return params
        given = params or self._default_params
        constrained = constrain_tools(given, tools, markup=self.parsers.markup)
        return params if constrained is given else constrained
