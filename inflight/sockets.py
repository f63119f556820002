"""`listen`: opens a TCP socket on which ranks listen, at one address of the machine. `unreachable`: tries such addresses.
`listen_locally`, `connect_locally`: the same for Unix sockets without a file, which end with the machine's processes.
`socket_pair`: two connected sockets, one of them for another process."""

import errno
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

_BACKLOG = 128
REACH_SECONDS = 2.0  # the kernel sends the first packet of a connection a second time after 1 s
_CHECK_SECONDS = 0.05


def listen(host: str, port: int) -> socket.socket:
    """Listen at this address only, never at all addresses of the machine. Port 0 means any free port.

    Raises:
        OSError: `host` is not an address of this machine, or the port is taken.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=_BACKLOG)


def shown(host: str, port: int) -> str:
    """Returns the address as people write it. An IPv6 address has brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen_locally(name: str) -> socket.socket:
    """
    Raises:
        OSError: another process listens.
    """
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(f"\0{name}")
        listening.listen(_BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening


def connect_locally(name: str) -> socket.socket:
    """
    Raises:
        OSError: nobody listens.
    """
    connected = socket.socket(socket.AF_UNIX)
    try:
        connected.connect(f"\0{name}")
    except BaseException:
        connected.close()
        raise
    return connected


@contextmanager
def socket_pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two connected sockets: ours, and theirs, which another process gets within the block. After the block theirs is closed
    here. Ours stays open, unless the block raises."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            yield ours, theirs
        except BaseException:
            ours.close()
            raise


def unreachable(
    addresses: Mapping[int, tuple[str, int]], seconds: float, is_in_vain: Callable[[], bool]
) -> tuple[int, ...]:
    """Connect to all addresses at the same time, and close the connections again. Returns the keys of the addresses that accept
    no connection within `seconds`, or so far, when `is_in_vain` returns True."""
    end = time.monotonic() + seconds
    poll = select.poll()
    waiting = {}
    failed = set()
    with ExitStack() as connections:
        for key, (host, port) in addresses.items():
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            connection = connections.enter_context(socket.socket(family, kind, protocol))
            connection.setblocking(False)
            if connection.connect_ex(address) in (0, errno.EINPROGRESS):
                waiting[connection.fileno()] = key, connection
                poll.register(connection, select.POLLOUT)
            else:
                failed.add(key)
        while waiting and time.monotonic() < end and not is_in_vain():
            for number, _ in poll.poll(_CHECK_SECONDS * 1000):
                key, connection = waiting.pop(number)
                poll.unregister(number)
                if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    failed.add(key)
        return tuple(sorted(failed | {key for key, _ in waiting.values()}))
