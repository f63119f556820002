"""`ReplicatedEngine`: several replicas of the engine, each in a process of its own, for `LLM`. It has those methods of
`LLMEngine` that `LLM` uses.

A thread with an event loop runs an `AsyncLLM`, which divides the requests among the replicas. If one is lost, its requests go
on at the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, Unpack

from inflight.config.engine_args import EngineArgs
from inflight.engine.request.input_processor import RequestOptions
from inflight.engine.request.prompt import Prompt
from inflight.engine.request.request_state import RequestOutputKind
from inflight.engine.serving.async_llm import AsyncLLM
from inflight.engine.serving.output_stream import OutputStream
from inflight.entrypoints.llm_engine import OfflineEngine
from inflight.errors import EngineClosedError
from inflight.outputs import RequestOutput
from inflight.processes.io_thread import IoThread
from inflight.sampling_params import SamplingParams

T = TypeVar("T")

MAX_STEP_SECONDS = 0.1  # `step` returns after this time, also if there is no output, so that an interrupt is noticed


class ReplicatedEngine(OfflineEngine):
    """Not thread-safe: only one thread may call its methods.

    Raises:
        ConfigError, EngineError: as `AsyncLLM.from_args`. No process is left running.
    """

    def __init__(self, args: EngineArgs) -> None:
        self._io = IoThread("inflight-replicas")
        self._io.start()
        try:
            self._engine = self._wait(AsyncLLM.from_args(args))
        except BaseException:
            self._wait(_others_ended())
            self._io.stop()
            raise
        super().__init__(self._engine.input_processor)
        self._news: SimpleQueue[RequestOutput | Exception] = SimpleQueue()
        self._reading: dict[str, asyncio.Task[None]] = {}  # id of a request that runs -> waits for its output

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:  # Any: of no use
        """Run it in the thread. An interrupt cancels it.

        Raises:
            EngineClosedError: `close` was called.
        """
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._io.loop)
        except RuntimeError:  # the loop is closed
            coroutine.close()
            raise EngineClosedError("the engine was closed; make a new one") from None
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> None:
        """Start a request. `LLMEngine.add_request` describes arguments and errors."""
        request = self._input_processor.process(request_id, prompt, params, **options)

        async def start() -> None:
            stream = self._engine.submit(request, kind=RequestOutputKind.FINAL_ONLY)
            self._reading[request_id] = asyncio.create_task(self._read(request_id, stream))

        self._wait(start())
        self._log_unenforced(request.unenforced)

    async def _read(self, request_id: str, stream: OutputStream) -> None:
        try:
            async for output in stream:
                self._news.put(output)
        except Exception as error:  # `step` raises it
            self._news.put(error)
        finally:
            await stream.aclose()
            self._reading.pop(request_id, None)

    def step(self) -> list[RequestOutput]:
        """Returns the requests that have ended since the last call. If there are none, waits for one, but not long.

        Raises:
            EngineError: a request has failed.
        """
        found: list[RequestOutput] = []
        try:
            while not found or not self._news.empty():
                news = self._news.get(timeout=MAX_STEP_SECONDS)
                if isinstance(news, Exception):
                    raise news
                found.append(news)
        except Empty:
            pass
        return found

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests at once. `step` returns none of them. Ids of unknown or ended requests are ignored."""

        async def abort() -> None:
            tasks = [self._reading[request_id] for request_id in request_ids if request_id in self._reading]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self._wait(abort())
        self._news = SimpleQueue()  # what was not read is of these requests

    def reset_prefix_cache(self) -> None:
        self._wait(self._engine.reset_prefix_cache())

    def close(self) -> None:
        """End all processes. Unfinished requests are dropped. Idempotent."""
        if not self._io.loop.is_closed():
            self._wait(self._engine.close())
            self._io.stop()


async def _others_ended() -> None:
    """Wait until all other tasks of this loop have ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)
