"""`EngineSockets`: gives one front end its sockets to the engine. For each new process of the engine there is a new socket."""

import asyncio
import socket

from inflight.errors import EngineDeadError


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

    async def get(self) -> socket.socket:
        """Wait for the next socket.

        Raises:
            EngineDeadError: the engine has failed for good.
        """
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
