"""`AsyncFrontEnd`: the part of `AsyncLLM` that is about texts: templates and tokens, on threads: no stream waits for them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from inflight.engine.front_end import FrontEnd
from inflight.engine.input_processor import ProcessedRequest, Prompt
from inflight.errors import EngineClosedError, InvalidRequestError, OverloadedError
from inflight.sample.seeds import derive_seed
from inflight.sampling_params import SamplingParams
from inflight.tokenizer.tokenizer import Tokenizer

T = TypeVar("T")

NUM_TEXT_THREADS = 4
LONG_TEXT = 2**16  # characters; longer ones wait for each other on a thread of their own, and no short one for them
MAX_WAITING_CHARACTERS = 2**24  # of each of the two kinds, for their tokens
CHARACTERS_PER_SECOND = 2**19  # about what a thread tokenises: for when to come again


class AsyncFrontEnd:
    """
    Attributes:
        tokenizer: None with skip_tokenizer_init.
        chat_template: None with skip_tokenizer_init.
        default_params: the `SamplingParams` of a request that brings none.
        default_max_tokens: of these, if generation_config.json names it.
    """

    def __init__(self, front_end: FrontEnd, seed: int) -> None:
        """`seed`: a request without a seed gets one from this and from its place in the order of the `process` calls."""
        self.tokenizer = front_end.tokenizer
        self.chat_template = front_end.chat_template
        self.default_params = front_end.default_params
        self.default_max_tokens = front_end.default_max_tokens
        self._front_end = front_end
        self._seed = seed
        self._numbers = itertools.count(1)
        self._threads = ThreadPoolExecutor(NUM_TEXT_THREADS, thread_name_prefix="inflight-text")
        self._long_thread = ThreadPoolExecutor(1, thread_name_prefix="inflight-long-text")
        self._num_waiting = {self._threads: 0, self._long_thread: 0}  # characters
        self._is_closed = False

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],  # Any: JSON
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """A conversation as the token ids of a prompt, by the model's chat template.

        Raises:
            InvalidRequestError: the messages are malformed, or the template refuses them.
        """
        render = partial(
            self._front_end.render_text,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        return await self.encode(await self._on_thread(render), add_special_tokens=False)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """A prompt's token ids.

        Raises:
            InvalidRequestError: it is too long for the model, or no Unicode; or there is no tokenizer.
            OverloadedError: too much text waits for its tokens.
        """
        encode = partial(self._front_end.encode, text, add_special_tokens=add_special_tokens)
        return await self._on_thread(encode, len(text))

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        tokenizer = self._needed_tokenizer()
        return await self._on_thread(partial(tokenizer.decode, token_ids, skip_special_tokens))

    async def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        add_special_tokens: bool = True,
        thinks_first: bool = True,
        arrival_time: float | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> ProcessedRequest:
        """Check and tokenise, without starting anything. The i-th call has the i-th seed, whichever ends first.

        Args:
            thinks_first: whether a grammar starts only after the engine's `reasoning_end`.
            arrival_time: `time.monotonic()` when the request came; None: now.

        Raises:
            InvalidRequestError: says what was given, what is allowed and what to do.
            OverloadedError: too much text waits for its tokens.
        """
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        process = partial(
            self._front_end.process,
            request_id,
            prompt,
            params,
            priority=priority,
            cache_salt=cache_salt,
            add_special_tokens=add_special_tokens,
            thinks_first=thinks_first,
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
            default_seed=derive_seed(self._seed, next(self._numbers)),
            trace_headers=trace_headers,
        )
        return await self._on_thread(process, len(text) if isinstance(text, str) else 0)

    async def _on_thread(self, function: Callable[[], T], num_characters: int = 0) -> T:
        """`num_characters`: of a text to be tokenised; one is always taken while no other waits."""
        if self._is_closed:
            raise EngineClosedError("the engine was closed; make a new one")
        threads = self._long_thread if num_characters > LONG_TEXT else self._threads
        waiting = self._num_waiting[threads]
        if num_characters and waiting and waiting + num_characters > MAX_WAITING_CHARACTERS:
            seconds = max(waiting // CHARACTERS_PER_SECOND, 1)
            raise OverloadedError(
                f"texts of {waiting} characters wait for their tokens; come again later", retry_after_seconds=seconds
            )
        self._num_waiting[threads] += num_characters
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, function)
        finally:
            self._num_waiting[threads] -= num_characters

    def _needed_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequestError("the engine has no tokenizer (skip_tokenizer_init=True)")
        return self.tokenizer

    def _close_texts(self) -> None:
        self._is_closed = True
        for threads in self._num_waiting:
            threads.shutdown(wait=False)
