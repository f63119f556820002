"""`Texts`: the part of `AsyncLLM` that renders chat templates and tokenises. Threads do this work."""

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar, Unpack

from inflight.engine.request.input_processor import ChatOptions, InputProcessor, ProcessedRequest, RequestOptions
from inflight.engine.request.prompt import Prompt
from inflight.errors import EngineClosedError, InvalidRequestError, OverloadedError
from inflight.sample.seeds import derive_seed
from inflight.sampling_params import SamplingParams

T = TypeVar("T")

NUM_TEXT_THREADS = 4
LONG_TEXT = 2**16  # characters; one thread tokenises all longer texts, so that shorter texts need not wait for them
# At most this many characters of long texts may wait to be tokenised. The same limit holds for all shorter texts together.
MAX_WAITING_CHARACTERS = 2**24
CHARACTERS_PER_SECOND = 2**19  # roughly the speed of one thread; tells a refused client when to try again


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
        self._threads = ThreadPoolExecutor(NUM_TEXT_THREADS, thread_name_prefix="inflight-text")
        self._long_thread = ThreadPoolExecutor(1, thread_name_prefix="inflight-long-text")
        self._num_waiting = {self._threads: 0, self._long_thread: 0}  # characters that have not been tokenised
        self._is_closed = False

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> list[int]:
        """Render a conversation with the model's chat template, and return the token ids of the prompt.

        Raises:
            InvalidRequestError: the messages are malformed, or the template refuses them.
        """
        text = await self._on_thread(partial(self.input_processor.render_text, messages, **options))
        return await self.encode(text, add_special_tokens=False)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenise a prompt.

        Raises:
            InvalidRequestError: the text is too long for the model or is not valid Unicode, or there is no tokenizer.
            OverloadedError: too much text waits to be tokenised.
        """
        encode = partial(self.input_processor.encode, text, add_special_tokens=add_special_tokens)
        return await self._on_thread(encode, len(text))

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        if self.tokenizer is None:
            raise InvalidRequestError("decoding needs a tokenizer, and the engine has none (skip_tokenizer_init=True)")
        return await self._on_thread(partial(self.tokenizer.decode, token_ids, skip_special_tokens))

    async def process(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> ProcessedRequest:
        """Check and tokenise a request without starting it. `InputProcessor.process` describes the arguments.

        Raises:
            InvalidRequestError: the request is wrong. The message says what was given, what is allowed and what to do.
            OverloadedError: too much text waits to be tokenised.
        """
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        # set the time now, because the request may wait until a thread is free
        options.setdefault("arrival_time", time.monotonic())
        seed = derive_seed(self._seed, next(self._numbers))  # not in a thread: the order of threads is not fixed
        process = partial(self.input_processor.process, request_id, prompt, params, default_seed=seed, **options)
        return await self._on_thread(process, len(text) if isinstance(text, str) else 0)

    async def _on_thread(self, function: Callable[[], T], num_characters: int = 0) -> T:
        """Run `function` in a thread. `num_characters` is the length of the text that `function` tokenises. If no other text
        waits in the same thread pool, a text of any length is accepted."""
        if self._is_closed:
            raise EngineClosedError("the engine was closed; make a new one")
        threads = self._long_thread if num_characters > LONG_TEXT else self._threads
        waiting = self._num_waiting[threads]
        if num_characters and waiting and waiting + num_characters > MAX_WAITING_CHARACTERS:
            seconds = max(waiting // CHARACTERS_PER_SECOND, 1)
            raise OverloadedError(
                f"{waiting} characters of text wait to be tokenised; try again later", retry_after_seconds=seconds
            )
        self._num_waiting[threads] += num_characters
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, function)
        finally:
            self._num_waiting[threads] -= num_characters

    def _close_texts(self) -> None:
        self._is_closed = True
        for threads in self._num_waiting:
            threads.shutdown(wait=False)
