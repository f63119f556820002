"""`AsyncFrontEnd`: the part of `AsyncLLM` that is about texts: templates and tokens, on threads: no stream waits for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from inflight.engine.front_end import FrontEnd
from inflight.engine.input_processor import ProcessedRequest, Prompt
from inflight.errors import EngineClosedError, InvalidRequestError
from inflight.sampling_params import SamplingParams
from inflight.tokenizer.tokenizer import Tokenizer

T = TypeVar("T")

NUM_TEXT_THREADS = 4


class AsyncFrontEnd:
    """
    Attributes:
        tokenizer: None with skip_tokenizer_init.
        chat_template: None with skip_tokenizer_init.
        default_params: the `SamplingParams` of a request that brings none.
    """

    def __init__(self, front_end: FrontEnd) -> None:
        self.tokenizer = front_end.tokenizer
        self.chat_template = front_end.chat_template
        self.default_params = front_end.default_params
        self._front_end = front_end
        self._threads = ThreadPoolExecutor(NUM_TEXT_THREADS, thread_name_prefix="inflight-text")
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
            self._front_end.render_chat,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        return await self._on_thread(render)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        tokenizer = self._needed_tokenizer()
        return await self._on_thread(partial(tokenizer.encode, text, add_special_tokens))

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
        trace_headers: Mapping[str, str] | None = None,
    ) -> ProcessedRequest:
        """Check and tokenise, without starting anything. The i-th call has the i-th seed, whichever ends first.

        Raises:
            InvalidRequestError: says what was given, what is allowed and what to do.
        """
        process = partial(
            self._front_end.process,
            request_id,
            prompt,
            params,
            priority=priority,
            cache_salt=cache_salt,
            add_special_tokens=add_special_tokens,
            arrival_time=time.monotonic(),
            number=self._front_end.next_number(),
            trace_headers=trace_headers,
        )
        return await self._on_thread(process)

    async def _on_thread(self, function: Callable[[], T]) -> T:
        if self._is_closed:
            raise EngineClosedError("the engine was closed; make a new one")
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    def _needed_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequestError("the engine has no tokenizer (skip_tokenizer_init=True)")
        return self.tokenizer

    def _close_texts(self) -> None:
        self._is_closed = True
        self._threads.shutdown(wait=False)
