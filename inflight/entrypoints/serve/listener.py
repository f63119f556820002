"""`Listener`: the socket of the server. It is bound before the model is loaded, so a wrong address is reported at once."""

import contextlib
import errno
import logging
import os
import resource
import socket
import stat
from pathlib import Path

from inflight.entrypoints.serve.settings import ServerSettings
from inflight.errors import ConfigError
from inflight.sockets import shown

logger = logging.getLogger(__name__)

_OTHER_FILES = 256  # files that a front end may open in addition to its connections


class Listener:
    """
    Args:
        settings: the socket listens on `uds`, or on `host` and `port` if `uds` is None.

    The constructor raises the process's limit of open files to the number that `max_connections` needs, or as far as the
    machine allows.

    Raises:
        ConfigError: the address is in use, does not belong to this machine, or is not allowed for this user.
    """

    def __init__(self, settings: ServerSettings) -> None:
        _allow_files(settings.max_connections + _OTHER_FILES)
        self._path = None if settings.uds is None else Path(settings.uds)
        self._inode = 0
        try:
            if self._path is not None:
                self.socket = _bind_unix(self._path)
                self._inode = self._path.stat().st_ino
            else:
                self.socket = _bind_tcp(settings.host, settings.port)
            self.socket.listen(settings.backlog)
        except OSError as error:
            where = f"uds={settings.uds!r}" if settings.uds is not None else shown(settings.host, settings.port)
            hint = (
                "; stop the program that uses it, or choose another --port" if error.errno == errno.EADDRINUSE else ""
            )
            reason = error.strerror or str(error)
            raise ConfigError(f"cannot listen on {where}: {reason}{hint}") from error
        self.socket.setblocking(False)

    @property
    def port(self) -> int | None:
        """The port, or None for a unix socket. If `settings.port` is 0, this is the port that the kernel has chosen."""
        if self._path is not None:
            return None
        return int(self.socket.getsockname()[1])

    def close(self) -> None:
        """Close the socket. Idempotent. Also removes the file of a unix socket, unless another server has replaced the file."""
        self.socket.close()
        if self._path is not None:
            with contextlib.suppress(OSError):
                if self._path.stat().st_ino == self._inode:
                    self._path.unlink()


def _allow_files(count: int) -> None:
    """Raise the limit of open files, which is 1024 on many systems. At the limit the server cannot accept a connection. The
    connection then waits in the kernel until the server closes a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    if hard != resource.RLIM_INFINITY and hard < count:
        logger.warning(
            "the system lets this process open only %d files (ulimit -Hn), too few for --max-connections", hard
        )
        count = hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def _bind_tcp(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)  # asyncio sets TCP_NODELAY only if the protocol is given
    try:
        # without this option, `bind` fails while connections of an earlier server still exist on the address
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def _bind_unix(path: Path) -> socket.socket:
    """Bind a unix socket. If the file exists and nobody listens on it, a killed server has left it, and it is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(os.fspath(path)) == errno.ECONNREFUSED:
                    path.unlink()
        listener.bind(os.fspath(path))
    except OSError:
        listener.close()
        raise
    return listener
