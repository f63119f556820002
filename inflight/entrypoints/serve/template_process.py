"""`TemplateProcesses`: renders chat templates of requests in other processes, which the kernel ends when they take too long.

Jinja's sandbox limits what a template can access, but not how long it runs. A template of one line can contain eight nested
loops of a thousand rounds each. A thread that runs such a template cannot be stopped, but a process can. Then only the request
with this template fails.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Mapping
from typing import Any

from inflight.entrypoints.serve.asgi import RETRY_AFTER_SECONDS
from inflight.errors import OverloadedError, TokenizerError, error_by_name
from inflight.processes.child_process import ChildProcess, stop_processes

MAX_PROCESSES = 2
MAX_WAITING = 64  # requests that may wait for a free process
START_SECONDS = 30.0  # time for a process to start
# A job is one template to render. On a busy machine it may take this many times its processor time, in wall-clock time.
WALL_FACTOR = 5
MAX_ANSWER_BYTES = 2**31  # an answer is always shorter, because the memory of the process is smaller
_MODULE = "inflight.entrypoints.serve.template_main"


class TemplateProcesses:
    """Used by one event loop. Processes start when they are needed, and stay for later requests.

    Args:
        seconds: processor time in which one template must compile and render.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # MAX_PROCESSES entries, except those in use. An entry is an idle process, or None if its process does not run now. The
        # queue is last in, first out, so that a process that runs already is preferred.
        self._free: asyncio.LifoQueue[_Helper | None] = asyncio.LifoQueue()
        for _ in range(MAX_PROCESSES):
            self._free.put_nowait(None)
        self._num_waiting = 0

    async def render(self, source: str, special_tokens: Mapping[str, str], **job: Any) -> str:  # Any: JSON
        """Returns the result of `ChatTemplate(source, special_tokens).render(**job)`.

        Raises:
            TokenizerError: the template is not valid Jinja, or needs too much time or memory.
            InvalidRequestError: the messages are malformed, or the template refuses them.
            OverloadedError: too many requests wait for a process.
        """
        if self._num_waiting >= MAX_WAITING:
            raise OverloadedError(
                f"{MAX_WAITING} requests with chat templates of their own are waiting already; try again later",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        job |= {"source": source, "special_tokens": dict(special_tokens), "seconds": self._seconds}
        content = await asyncio.to_thread(lambda: json.dumps(job).encode() + b"\n")
        self._num_waiting += 1
        try:
            helper = await self._free.get()
        finally:
            self._num_waiting -= 1
        running: _Helper | None = None
        try:
            running, answer = await self._ask(helper, content)
        finally:
            self._free.put_nowait(running)
        if "error" in answer:
            name, message = answer["error"]
            error = error_by_name(name, message)
            assert error is not None, name
            raise error
        text: str = answer["text"]
        return text

    async def _ask(self, helper: _Helper | None, content: bytes) -> tuple[_Helper, dict[str, Any]]:
        """Returns the process that has answered, and its answer. This is a new process if `helper` is None or has ended."""
        seconds = WALL_FACTOR * self._seconds
        if helper is not None and not helper.process.is_alive:  # for instance, the kernel ended it to free memory
            await helper.close()
            helper = None
        if helper is None:
            helper = _Helper()
            seconds += START_SECONDS
        try:
            async with asyncio.timeout(seconds):
                return helper, await helper.ask(content)
        except (TimeoutError, EOFError, ConnectionError) as error:
            ended_by = await helper.close()
            why = "cannot be rendered"
            if isinstance(error, TimeoutError) or ended_by == -signal.SIGPROF:
                why = f"takes longer than the {self._seconds:g} s of --template-timeout"
            raise TokenizerError(f"chat_template: the template {why}") from None
        except BaseException:  # the task was cancelled, for instance because the client has disconnected
            await helper.close()
            raise

    async def close(self) -> None:
        """End the idle processes. A process that still renders ends when its request is cancelled, when its time is over, or
        when the server's process ends and so closes the socket."""
        while not self._free.empty():
            if (helper := self._free.get_nowait()) is not None:
                await helper.close()


class _Helper:
    """One process, for one job at a time."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self.process = ChildProcess("inflight: template", _MODULE, [theirs.fileno()])
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, content: bytes) -> dict[str, Any]:
        """
        Raises:
            EOFError, ConnectionError: the process has ended.
        """
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(sock=self._socket, limit=MAX_ANSWER_BYTES)
        reader, writer = self._streams
        writer.write(content)
        await writer.drain()
        received = await reader.readuntil()
        answer: dict[str, Any] = await asyncio.to_thread(json.loads, received)
        return answer

    async def close(self) -> int | None:
        """End the process if it still runs. Returns its exit code as `subprocess` defines it. Call it once."""
        if self._streams is not None:
            self._streams[1].transport.abort()
        self._socket.close()
        self.process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(stop_processes, [self.process], 1.0)
        code = self.process.exit_code
        self.process.close()
        return code
