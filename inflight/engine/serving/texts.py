"""`Texts`: the part of `AsyncLLM` that renders chat templates and tokenises. Threads do this work (`TextLanes`)."""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, Unpack

from inflight.engine.request.chats import ChatOptions
from inflight.engine.request.input_processor import InputProcessor
from inflight.engine.request.prepared_prompt import PreparedPrompt
from inflight.engine.request.processed import ProcessedRequest, RequestOptions
from inflight.engine.request.prompt import Prompt
from inflight.engine.serving.client import CLIENT
from inflight.engine.serving.text_lanes import TextLanes
from inflight.errors import InvalidRequestError
from inflight.pooling_params import Params
from inflight.sample.seeds import derive_seed

T = TypeVar("T")
CHARACTERS_PER_TOKEN = 4  # roughly


class Texts:
    """
    Attributes:
        tokenizer: None if skip_tokenizer_init=True.
        chat_template: None if skip_tokenizer_init=True.
        default_params: used for a request without `SamplingParams`.
        input_processor: checks and tokenises requests.
        default_max_tokens: `max_new_tokens` in the model's generation defaults; None if they do not contain it.
    """

    def __init__(self, input_processor: InputProcessor, seed: int) -> None:
        """If a request has no seed, its seed is derived from `seed` and from the number of earlier calls of `process`."""
        self.tokenizer = input_processor.tokenizer
        self.chat_template = input_processor.chat_template
        self.default_params = input_processor.default_params
        self.default_max_tokens = input_processor.default_max_tokens
        self.input_processor = input_processor
        self._seed = seed
        self._numbers = itertools.count(1)
        self._lanes = TextLanes(self._check_loop)

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> list[int]:
        """Render a conversation with the model's chat template, and return the token ids of the prompt.

        Raises:
            InvalidRequestError: the messages are malformed, or the template refuses them.
        """
        text = await self.render(partial(self.input_processor.chats.render_text, messages, **options))
        return await self.encode(text, add_special_tokens=False)

    async def render(self, render: Callable[[], T]) -> T:
        """Run a rendering of a chat template in a thread. Clients take turns. It ends when the caller is cancelled."""
        return await self._lanes.render(render)

    async def encode(self, text: str, *, add_special_tokens: bool = True, behind: bool = False) -> list[int]:
        """Tokenise a prompt. `behind`: it may wait for the texts of requests.

        Raises:
            InvalidRequestError: the text is too long for the model or is not valid Unicode, or there is no tokenizer.
            OverloadedError: too much text waits to be tokenised, and the most of it is this client's.
        """
        encode = partial(self.input_processor.encode, text, add_special_tokens=add_special_tokens)
        return await self._lanes.run(encode, len(text), behind=behind)

    async def prepare(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> PreparedPrompt:
        """Read and tokenise a prompt, and process its images. See `InputProcessor.prepare`.

        Raises: as `process`.
        """
        prompt = await self._with_images(prompt, options)
        prepare = partial(self.input_processor.prepare, prompt, **options)
        return await self._lanes.run(prepare, _num_characters(prompt))

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        if self.tokenizer is None:
            raise InvalidRequestError("decoding needs a tokenizer, and the engine has none (skip_tokenizer_init=True)")
        decode = partial(self.tokenizer.decode, token_ids, skip_special_tokens)
        return await self._lanes.run(decode, len(token_ids) * CHARACTERS_PER_TOKEN)

    async def process(
        self, request_id: str, prompt: Prompt, params: Params | None = None, **options: Unpack[RequestOptions]
    ) -> ProcessedRequest:
        """Check and tokenise a request without starting it. `InputProcessor.process` describes the arguments.

        Raises:
            InvalidRequestError: the request is wrong. The message says what was given, what is allowed and what to do.
            OverloadedError: too much text waits to be tokenised, or too many images wait, and the most of it is this client's.
        """
        # set the time now, because the request may wait until a thread is free
        options.setdefault("arrival_time", time.monotonic())
        seed = derive_seed(self._seed, next(self._numbers))  # not in a thread: the order of threads is not fixed
        prompt = await self._with_images(prompt, options)
        process = partial(self.input_processor.process, request_id, prompt, params, default_seed=seed, **options)
        return await self._lanes.run(process, _num_characters(prompt))

    async def _with_images(self, prompt: Prompt, options: RequestOptions) -> Any:  # Any: a prompt of any form
        return await self.input_processor.images.prepared(prompt, options.get("cache_salt", ""), CLIENT.get())

    def _check_loop(self) -> None:
        """Raises an `EngineError` if this may not be used here."""

    def _close_texts(self) -> None:
        self._lanes.close()
        self.input_processor.images.close()


def _num_characters(prompt: object) -> int:
    """The length of the text of a prompt; 0 if it has none."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return len(text) if isinstance(text, str) else 0
