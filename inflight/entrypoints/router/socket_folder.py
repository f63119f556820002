"""`SocketFolder`: the folder of the sockets at which the processes of models listen."""

import os
import shutil
import stat
import tempfile
from pathlib import Path

_MAX_FOLDER_BYTES = 80  # so that the path of a socket in it is not too long for the kernel


class SocketFolder:
    """Only this user may open the folder, so only this user reaches the sockets."""

    def __init__(self) -> None:
        self._folder = _make()
        self._num_paths = 0

    def new_path(self) -> str:
        """A path for one more socket. If the folder has gone, because a program that cleans /tmp has found it empty for days,
        another one is made.

        Raises:
            OSError: a folder cannot be made.
        """
        if not _is_own(self._folder):
            self._folder = _make()
        self._num_paths += 1
        return str(Path(self._folder) / f"{self._num_paths}.sock")

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _make() -> str:
    base = tempfile.gettempdir()
    is_long = len(os.fsencode(base)) > _MAX_FOLDER_BYTES
    return tempfile.mkdtemp(prefix="inflight-models-", dir="/tmp" if is_long else base)


def _is_own(folder: str) -> bool:
    """Whether the folder is there, and nobody else has made it."""
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
