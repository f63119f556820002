"""`EngineSockets`: gives one front end its sockets to the engine. For each new process of the engine there is a new socket."""

import asyncio
import contextlib
import socket
from collections.abc import Callable

from inflight.errors import EngineDeadError

GIVE_UP_SECONDS = 5.0  # what the owner of the engine's process may need to see that the process cannot start


class EngineSockets:
    """All methods are called on the front end's event loop. The caller of `get` must close the socket that it gets."""

    def __init__(self) -> None:
        self._arrived: asyncio.Queue[socket.socket | EngineDeadError] = asyncio.Queue()

    def put(self, engine_socket: socket.socket) -> bool:
        """Hand over the socket to a new process of the engine. Returns True: this front end runs in this process."""
        self._arrived.put_nowait(engine_socket)
        return True

    def fail(self, error: EngineDeadError) -> None:
        """Tell the front end that the engine has failed for good, so no new process will be started."""
        self._arrived.put_nowait(error)

    async def get(self, tell: Callable[[], None] | None = None) -> socket.socket:
        """Wait for the next socket.

        Args:
            tell: called after GIVE_UP_SECONDS, or when the next socket comes or this call is cancelled before. It is not called
                if the engine fails for good in this time.

        Raises:
            EngineDeadError: the engine has failed for good.
        """
        arrived: socket.socket | EngineDeadError | None = None
        if tell is not None:
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(GIVE_UP_SECONDS):
                        arrived = await self._arrived.get()
            finally:
                if not isinstance(arrived, EngineDeadError):
                    tell()
        if arrived is None:
            arrived = await self._arrived.get()
        if isinstance(arrived, EngineDeadError):
            raise arrived
        return arrived

    def close(self) -> None:
        """Close the sockets that `get` has not returned."""
        while not self._arrived.empty():
            arrived = self._arrived.get_nowait()
            if isinstance(arrived, socket.socket):
                arrived.close()
