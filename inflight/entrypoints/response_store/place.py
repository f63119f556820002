"""`StorePlace`: where the responses of a server are kept, from its start to its end."""

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from inflight.entrypoints.response_store.processes import is_running, own_name
from inflight.entrypoints.response_store.store import ResponseStore
from inflight.entrypoints.serve.settings import NO_STORE, TEMPORARY_STORE, ServerSettings
from inflight.errors import ConfigError

logger = logging.getLogger(__name__)

_PREFIX = "inflight-responses-"
_FILE = "responses.sqlite"


class StorePlace:
    """The file of one server. All its processes get `settings`, in which `response_store` is a path or "none".

    A temporary file is in a folder that only this user can read. `close` removes it. If the server was killed, the next server
    of this user removes it. The folder is locked, so that systemd-tmpfiles, which removes old files from /tmp, leaves it alone
    (tmpfiles.d(5)).

    Raises:
        ConfigError: the file that the settings name cannot be used.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._remove: Callable[[], object] = lambda: None
        chosen = settings.response_store
        if chosen == TEMPORARY_STORE:
            chosen = self._make_folder()
        elif chosen != NO_STORE:
            chosen = _checked(Path(chosen).expanduser().absolute())
        self.settings = replace(settings, response_store=chosen)

    def _make_folder(self) -> str:
        _remove_left_folders()
        try:
            folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{own_name()}-")
        except OSError as error:
            logger.warning("no responses are stored, because no temporary folder can be made: %s", error)
            return NO_STORE
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_SH)
        self._remove = weakref.finalize(self, _remove_folder, folder, lock)
        return str(Path(folder, _FILE))

    def close(self) -> None:
        """Remove the file, if it is a temporary one. No process may use it any more."""
        self._remove()


def check_place(settings: ServerSettings) -> None:
    """Find out whether a server with these settings could store responses. A file that is not there is not made.

    Raises:
        ConfigError: the file that the settings name cannot be used.
    """
    if settings.response_store not in (TEMPORARY_STORE, NO_STORE):
        _checked(Path(settings.response_store).expanduser().absolute(), makes_file=False)


def _checked(path: Path, *, makes_file: bool = True) -> str:
    try:
        if makes_file or path.exists():
            store = ResponseStore(path)
            with contextlib.closing(store):
                store.check()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except Exception as error:
        raise ConfigError(
            f"response_store={str(path)!r} cannot be used: {error}. Give a file in a folder that you may write to, "
            f"{TEMPORARY_STORE!r} or {NO_STORE!r}"
        ) from error
    return str(path)


def _remove_folder(folder: str, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _remove_left_folders() -> None:
    """Remove the folders of servers that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        name = folder.name.removeprefix(_PREFIX).rpartition("-")[0]
        try:
            is_own = folder.lstat().st_uid == os.getuid() and not folder.is_symlink()
        except OSError:
            continue
        if is_own and not is_running(name):
            shutil.rmtree(folder, ignore_errors=True)
