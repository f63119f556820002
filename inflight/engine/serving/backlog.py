"""`Backlog`: holds outputs of the engine until the front end processes them. The event loop processes them in short slices.

Between two slices the event loop can do other things, even if a large batch of outputs waits. An output with many
log-probabilities is divided into pieces, because it would make a slice too long. If outputs arrive faster than they are
processed, the connection to the engine is paused: it reads nothing until all outputs have been processed.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from inflight.interface.request import EngineCoreOutput

logger = logging.getLogger(__name__)

SLICE_SECONDS = 0.001  # the length of a slice
SLICE_OUTPUTS = 16  # after this number of outputs the clock is read again
# The clock is also read after this number of log-probabilities. An output or piece may have as many, so up to twice as many are
# processed before the clock is read. This takes 2 ms.
SLICE_LOGPROBS = 1024
MAX_BACKLOG = 4096  # if more outputs than this wait, the connection to the engine is paused


class EngineConnection(Protocol):
    """The connection to the engine, as a backlog sees it."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def end(self, reason: str) -> None: ...


class Backlog:
    """Only the event loop's thread may call the methods.

    Args:
        client: the connection to the engine, which is paused, resumed and, after an error of `process`, closed.
        process: called with some outputs, in order. If it raises, all waiting outputs are dropped and the connection is closed.
    """

    def __init__(self, client: EngineConnection, process: Callable[[Sequence[EngineCoreOutput]], None]) -> None:
        self._client = client
        self._process = process
        self._outputs: deque[EngineCoreOutput] = deque()
        self._is_paused = False

    def extend(self, outputs: Sequence[EngineCoreOutput]) -> None:
        was_empty = not self._outputs
        for output in outputs:
            if _num_logprobs(output) > SLICE_LOGPROBS:
                self._outputs.extend(_pieces(output))
            else:
                self._outputs.append(output)
        if was_empty:
            self._run()
        if len(self._outputs) > MAX_BACKLOG and not self._is_paused:
            self._is_paused = True
            self._client.pause()

    def finish(self) -> None:
        """Process all outputs at once. Call this when the connection to the engine has ended."""
        self._is_paused = False
        while self._outputs and self._process_some():
            pass

    def _run(self) -> None:
        """Process one slice, and let the event loop call this method again if outputs are left."""
        end = time.perf_counter() + SLICE_SECONDS
        while self._outputs:
            if time.perf_counter() > end:
                asyncio.get_running_loop().call_soon(self._run)
                return
            if not self._process_some():
                return
        if self._is_paused:
            self._is_paused = False
            self._client.resume()

    def _process_some(self) -> bool:
        """Process a few of the oldest outputs. If this fails, close the connection to the engine and return False."""
        some: list[EngineCoreOutput] = []
        num_logprobs = 0
        while self._outputs and len(some) < SLICE_OUTPUTS and num_logprobs < SLICE_LOGPROBS:
            some.append(self._outputs.popleft())
            num_logprobs += _num_logprobs(some[-1])
        try:
            self._process(some)
        except Exception as error:
            logger.exception("the front end failed to process outputs of the engine, so it closes the connection")
            self._outputs.clear()
            self._client.end(f"the front end failed to process outputs of the engine: {error!r}")
            return False
        return True


def _num_logprobs(output: EngineCoreOutput) -> int:
    size = 0 if output.logprobs is None else output.logprobs.token_ids.size
    return size + sum(part.size for part in output.parts)


def _pieces(output: EngineCoreOutput) -> Iterator[EngineCoreOutput]:
    """Divide `output` into pieces with a few numbers each. If `output` has a finish reason, only the last piece has it."""
    unfinished = replace(
        output, new_token_ids=(), logprobs=None, parts=(), finish_reason=None, stop_reason=None, error=""
    )
    for part in output.parts:
        for piece in part.pieces(SLICE_LOGPROBS):
            yield replace(unfinished, parts=(piece,))
    done = 0
    for start, rows in output.logprobs.pieces(SLICE_LOGPROBS) if output.logprobs is not None else ():
        done = start + len(rows.ranks)
        if done < len(output.new_token_ids):
            yield replace(unfinished, new_token_ids=output.new_token_ids[start:done], logprobs=rows)
        else:
            yield replace(output, new_token_ids=output.new_token_ids[start:], logprobs=rows, parts=())
            return
    yield replace(output, new_token_ids=output.new_token_ids[done:], logprobs=None, parts=())
