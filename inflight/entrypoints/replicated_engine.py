"""`ReplicatedEngine`: several replicas of the engine, each in a process of its own, for `LLM`.

A thread with an event loop runs an `AsyncLLM`, which divides the requests among the replicas. If one is lost, its requests go
on at the others.
"""

import asyncio
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from functools import partial
from queue import Empty, Queue
from typing import Any, TypeVar, Unpack

from inflight.config.engine_args import EngineArgs
from inflight.engine.request.processed import ProcessedRequest, RequestOptions
from inflight.engine.request.prompt import Prompt
from inflight.engine.request.request_state import RequestOutputKind
from inflight.engine.serving.async_llm import AsyncLLM
from inflight.engine.serving.output_stream import OutputStream
from inflight.entrypoints.offline_engine import OfflineEngine
from inflight.errors import EngineClosedError
from inflight.outputs import RequestOutput
from inflight.pooling_params import Params
from inflight.processes.io_thread import IoThread
from inflight.processes.object_end import close_with, run_to_end

T = TypeVar("T")

MAX_STEP_SECONDS = 0.1  # `step` returns after this time, also if there is no output, so that an interrupt is noticed


class ReplicatedEngine(OfflineEngine):
    """Not thread-safe: only one thread may call its methods, but any thread may call `close`.

    Raises:
        ConfigError, EngineError: as `AsyncLLM.from_args`. No process is left running.
    """

    def __init__(self, args: EngineArgs) -> None:
        self._io = IoThread("inflight-replicas")
        self._io.start()
        try:
            self._engine = self._run(AsyncLLM.from_args(args))
        except BaseException:
            run_to_end(self._end_start)
            raise
        super().__init__(self._engine.input_processor)
        self._added: list[ProcessedRequest] = []  # `step` starts them
        self._news: Queue[RequestOutput | Exception] = Queue()
        self._reading: dict[str, asyncio.Task[None]] = {}  # request id -> the task that waits for its output
        self._keep_open = close_with(self, partial(_close, self._io, self._engine))

    def _end_start(self) -> None:
        self._run(_others_ended())  # after an interrupt, `from_args` still ends its processes
        self._io.stop()

    # Any: what a coroutine yields and receives is not used here
    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it in the thread, and wait for it.

        Raises:
            EngineClosedError: `close` was called, or this process was forked.
        """
        try:
            return self._io.run_coroutine(coroutine)
        except RuntimeError:
            if not self._io.is_closed:
                raise
            raise EngineClosedError("the engine was closed, or belongs to another process; make a new one") from None

    def add_request(
        self, request_id: str, prompt: Prompt, params: Params | None = None, **options: Unpack[RequestOptions]
    ) -> None:
        self._added.append(self._input_processor.process(request_id, prompt, params, **options))
        self._log_unenforced(self._added[-1].unenforced)

    async def _start(self, requests: list[ProcessedRequest]) -> None:
        for stream in self._engine.submit_all(requests, kind=RequestOutputKind.FINAL_ONLY):
            self._reading[stream.request.request_id] = asyncio.create_task(self._read(stream))

    async def _read(self, stream: OutputStream) -> None:
        try:
            async for output in stream:
                self._news.put(output)
        except Exception as error:  # `step` raises it
            self._news.put(error)
        finally:
            await stream.aclose()
            del self._reading[stream.request.request_id]

    def step(self) -> list[RequestOutput]:
        """Start the requests that were added. Returns the outputs of those that have ended since the last call. If there are
        none, waits for one, at most MAX_STEP_SECONDS. An error is raised only if all replicas are gone, or if `close` was
        called: the requests of a step that fails end with the finish reason "error".
        """
        added, self._added = self._added, []
        if added:
            self._run(self._start(added))
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
        """End all requests. `request_ids` must have the ids of all: only one call of `LLM` runs at a time."""

        async def abort() -> None:
            tasks = list(self._reading.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self._added = []
        self._run(abort())
        self._news = Queue()

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> None:
        self._run(self._engine.reset_prefix_cache(reset_connector=reset_connector))

    def close(self) -> None:
        run_to_end(partial(_close, self._io, self._engine))
        self._keep_open()


def _close(io: IoThread, engine: AsyncLLM) -> None:
    if not io.is_closed:
        with suppress(RuntimeError):  # another thread closes it, too
            io.run_coroutine(engine.close())
        io.stop()


async def _others_ended() -> None:
    """Wait until all other tasks of this loop have ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)
