"""`HiddenSocket`: the socket at which the process of a model listens. It has no name, so nothing is left of it, and no other
program reaches it.

A Unix socket is bound to a file. The router opens this file, and removes it at once. From then on only the router can connect,
through its descriptor: /proc/self/fd/N. When the last process that has the socket ends, however it ends, the kernel removes it.
"""

import os
import shutil
import socket
import tempfile
from collections.abc import Callable

from inflight.entrypoints.serve.listener import Listener
from inflight.entrypoints.serve.settings import ServerSettings

NOWHERE = "/proc/self/fd/-1"  # connections to it fail
_MAX_FOLDER_BYTES = 80  # so that the path of a socket in it is not too long for the kernel


class HiddenSocket:
    """
    Args:
        settings_for: makes the settings of a server that listens at a path.

    Attributes:
        listener: for the process that listens. The caller closes it.
        path: where this process connects to it. NOWHERE after `close`.

    Raises:
        ConfigError: see `settings_for`, and `Listener`.
        OSError: the file cannot be made now.
    """

    def __init__(self, settings_for: Callable[[str], ServerSettings]) -> None:
        folder = _make_folder()  # only this user may open it, so nobody else connects in the meantime
        try:
            path = f"{folder}/s"
            self.listener: socket.socket = Listener(settings_for(path)).socket
            try:
                self._fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                self.listener.close()
                raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self.path = f"/proc/self/fd/{self._fd}"

    def close(self) -> None:
        """Let nobody connect any more. Call it once. Do not keep `path`: another file may get the number of the descriptor."""
        self.path = NOWHERE
        os.close(self._fd)


def _make_folder() -> str:
    base = tempfile.gettempdir()
    is_long = len(os.fsencode(base)) > _MAX_FOLDER_BYTES
    return tempfile.mkdtemp(prefix="inflight-models-", dir="/tmp" if is_long else base)
