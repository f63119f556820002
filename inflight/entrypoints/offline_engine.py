"""`OfflineEngine`: what `LLM` needs of an engine, in this process or in others."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

from inflight.engine.request.chats import ChatOptions
from inflight.engine.request.input_processor import InputProcessor
from inflight.engine.request.processed import RequestOptions
from inflight.engine.request.prompt import Prompt
from inflight.entrypoints.assistant_message import assistant_message
from inflight.entrypoints.written_answer import REASONING_FIELDS
from inflight.errors import InvalidRequestError
from inflight.outputs import RequestOutput
from inflight.pooling_params import Params
from inflight.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

MAX_UNENFORCED_LINES = 1000  # at most this many log lines about parts of schemas that are not enforced


class OfflineEngine(ABC):
    """What `LLM` needs of an engine.

    Attributes:
        tokenizer: None if skip_tokenizer_init=True.
        chat_template: None if skip_tokenizer_init=True.
        has_chat_template: whether a chat needs no template of its own.
        model_config: the model, resolved.
        images: prepares prompts with images.
        takes_images: whether prompts may have images.
        default_params: used for a request without `SamplingParams`.
    """

    def __init__(self, input_processor: InputProcessor) -> None:
        self.tokenizer = input_processor.tokenizer
        self.chat_template = input_processor.chat_template
        self.default_params = input_processor.default_params
        template = self.chat_template
        self.has_chat_template = template is not None and template.default_source is not None
        self.model_config = input_processor.config.model
        self.images = input_processor.images
        self.takes_images = self.model_config.architecture.vision is not None
        self._input_processor = input_processor
        self._logged_unenforced: set[str] = set()

    # Any: JSON
    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> list[int]:
        """Render a conversation with the model's chat template, and return the token ids of the prompt."""
        text = self._input_processor.chats.render_text(messages, **options)
        return self._input_processor.encode(text, add_special_tokens=False)

    # Any: JSON, and images
    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> Prompt:
        """Render a conversation, which may have images, with the model's chat template. The prompt is for a request with
        add_special_tokens=False."""
        prompt = self._input_processor.chats.prompt(messages, **options)
        if "multi_modal_data" in prompt:
            return prompt
        return {"prompt_token_ids": self._input_processor.encode(prompt["prompt"], add_special_tokens=False)}

    def with_strict_tools(
        self, params: SamplingParams | None, tools: Sequence[Mapping[str, Any]] | None
    ) -> SamplingParams | None:
        """See `Chats.with_strict_tools`."""
        return self._input_processor.chats.with_strict_tools(params, tools)

    def assistant_message(
        self, output: RequestOutput, tools: Sequence[Mapping[str, Any]] | None, index: int, reasoning_field: str
    ) -> dict[str, Any]:  # Any: JSON
        """See `LLM.assistant_message`."""
        if self.tokenizer is None:
            raise InvalidRequestError("a message needs a tokenizer, and the engine has none (skip_tokenizer_init=True)")
        completion = next((each for each in output.outputs if each.index == index), None)
        if completion is None:
            raise InvalidRequestError(f"index={index}: the output has {len(output.outputs)} completions, from index 0")
        if reasoning_field not in REASONING_FIELDS:
            raise InvalidRequestError(
                f"reasoning_field={reasoning_field!r} is not allowed: give one of {', '.join(REASONING_FIELDS)}"
            )
        parsers = self._input_processor.chats.parsers
        return assistant_message(completion, output.prompt_token_ids, self.tokenizer, parsers, tools, reasoning_field)

    def _log_unenforced(self, places: Iterable[object]) -> None:
        """Log each place only once, because the requests of a batch usually have the same schema."""
        for place in map(str, places):
            if place not in self._logged_unenforced and len(self._logged_unenforced) < MAX_UNENFORCED_LINES:
                self._logged_unenforced.add(place)
                logger.warning("%s: the grammar library cannot enforce this part, so it is ignored", place)

    @abstractmethod
    def add_request(
        self, request_id: str, prompt: Prompt, params: Params | None = None, **options: Unpack[RequestOptions]
    ) -> None:
        """Queue a request. Calls of `step` compute it. `InputProcessor.process` describes the arguments.

        Raises:
            InvalidRequestError: the request is wrong (the message says what to do), or a request with this id still runs.
        """

    @abstractmethod
    def step(self) -> list[RequestOutput]:
        """Go on for a moment. Returns outputs of requests, at least of those that have ended.

        Raises:
            EngineError: requests have failed. Abort all.
            EngineDeadError: the engine cannot continue.
        """

    @abstractmethod
    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests at once. `step` returns no more outputs of them. Ids of unknown or ended requests are ignored."""

    @abstractmethod
    def reset_prefix_cache(self, *, reset_connector: bool = False) -> None:
        """Forget the KV blocks of earlier prompts. With `reset_connector` also those in host memory and tiers."""

    @abstractmethod
    def close(self) -> None:
        """End all threads and processes of the engine. Unfinished requests are dropped. Idempotent."""
