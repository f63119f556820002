"""Fetches images from web servers, without becoming a way into the network of this machine.

1. Only hosts that the operator has named (--allowed-media-domains) are asked.
2. The name is resolved once. If any of its addresses is not public (private, loopback, link-local and others), nothing is
   fetched. The connection is made to one of these very addresses, so an answer of the DNS that differs later has no effect.
3. Redirects are not followed.
4. The whole fetch has one deadline, and the body a limit.
"""

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from urllib.parse import urlsplit

import numpy as np

from inflight.errors import InvalidRequestError
from inflight.interface.framing import ByteArray
from inflight.version import __version__

_READ_BYTES = 2**18
_PORTS = {"http": 80, "https": 443}
# IPv6 addresses whose last four bytes are an IPv4 address (RFC 6052, RFC 4291)
_WITH_IPV4 = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "::/96", "::ffff:0:0:0/96")))
# local NAT64 (RFC 8215), site-local addresses, documentation (RFC 9637), segment routing (RFC 9602), and Azure's own server
_NOT_PUBLIC = tuple(
    map(ipaddress.ip_network, ("64:ff9b:1::/48", "fec0::/10", "3fff::/20", "5f00::/16", "168.63.129.16/32"))
)

_MOST_REASON = 100  # characters, because some are of the server that was asked

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class WebUrl:
    """
    Attributes:
        target: the path with the query, as the request names it.
    """

    scheme: str
    host: str
    port: int
    target: str


def read_web_url(url: str, allowed: Collection[str]) -> WebUrl:
    """Returns the parts of an http: or https: URL of an allowed host.

    Raises:
        InvalidRequestError: the host is not allowed, or it is no such URL.
    """
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port
        target = (parts.path or "/").encode("ascii", "strict").decode() + (f"?{parts.query}" if parts.query else "")
        target.encode("ascii")
    except ValueError as error:  # also a UnicodeError
        raise InvalidRequestError(f"the URL of an image cannot be read: {error}") from None
    if not host or any(character <= " " or character == "\x7f" for character in url):
        raise InvalidRequestError("the URL of an image must be written as https://host/path, without spaces")
    if parts.username is not None or parts.password is not None:
        raise InvalidRequestError("the URL of an image must not contain a name or a password of a user")
    if host not in allowed:
        raise InvalidRequestError(
            f"images may not be fetched from {host!r}; "
            + (f"allowed are {', '.join(sorted(allowed))}" if allowed else "the server needs --allowed-media-domains")
        )
    return WebUrl(parts.scheme, host, port or _PORTS[parts.scheme], target)


def fetch(
    url: WebUrl, seconds: float, max_bytes: int, is_allowed: Callable[[Address], bool] | None = None
) -> ByteArray:
    """Fetch a file.

    Args:
        seconds: how long it may take in all.
        is_allowed: which addresses may be asked; by default `is_public`.

    Raises:
        InvalidRequestError: there is no answer in time, the answer is no file, or an address is not allowed.
    """
    end = time.monotonic() + seconds
    address = _resolve(url, is_allowed or is_public)
    left = max(0.001, end - time.monotonic())
    connection = _connection(url, address, left)
    # it also ends a read of a server that sends one byte after the other
    timer = threading.Timer(left, _cut, [connection])
    timer.daemon = True
    timer.start()
    try:
        content = _get(connection, url, max_bytes)
        if time.monotonic() >= end:  # what was cut off may look like an end
            raise TimeoutError
        return content
    except InvalidRequestError:
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:
        if time.monotonic() >= end or isinstance(error, TimeoutError):
            raise InvalidRequestError(f"{url.host} has not sent the image within {seconds:g} seconds") from None
        reason = (str(error) or type(error).__name__)[:_MOST_REASON]
        raise InvalidRequestError(f"the image cannot be fetched from {url.host}: {reason}") from None
    finally:
        timer.cancel()
        connection.close()


def is_public(address: Address) -> bool:
    """Whether an address is one of the internet. An IPv6 address that stands for an IPv4 address is judged as that one."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if any(address in network for network in _WITH_IPV4):
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
    if any(address in network for network in _NOT_PUBLIC):
        return False
    return address.is_global and not address.is_multicast


def _resolve(url: WebUrl, is_allowed: Callable[[Address], bool]) -> str:
    """Returns an address of the host."""
    try:
        found = socket.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise InvalidRequestError(f"the host {url.host!r} of an image cannot be found") from None
    texts = [str(each[4][0]) for each in found]
    if not texts or not all(is_allowed(ipaddress.ip_address(text.partition("%")[0])) for text in texts):
        raise InvalidRequestError(f"the host {url.host!r} of an image has an address that is not public")
    return texts[0]


class _Pinned(http.client.HTTPConnection):
    """Connects to an address, whatever the name of the host is now.

    Attributes:
        stream: the connected socket. `sock` is None once the response has it.
    """

    stream: socket.socket | None = None

    def __init__(self, url: WebUrl, address: str, seconds: float) -> None:
        super().__init__(url.host, url.port, timeout=seconds)
        self._address = address

    def connect(self) -> None:
        self.sock = self.stream = socket.create_connection((self._address, self.port), self.timeout)


class _PinnedHttps(_Pinned):
    default_port = http.client.HTTPS_PORT

    def connect(self) -> None:
        super().connect()
        context = ssl.create_default_context()
        self.sock = self.stream = context.wrap_socket(self.sock, server_hostname=self.host)


def _connection(url: WebUrl, address: str, seconds: float) -> _Pinned:
    if url.scheme == "https":
        return _PinnedHttps(url, address, seconds)
    return _Pinned(url, address, seconds)


def _get(connection: _Pinned, url: WebUrl, max_bytes: int) -> ByteArray:
    headers = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": f"inflight/{__version__}"}
    connection.request("GET", url.target, headers=headers)
    with connection.getresponse() as response:
        return _read(response, url, max_bytes)


def _read(response: http.client.HTTPResponse, url: WebUrl, max_bytes: int) -> ByteArray:
    if 300 <= response.status < 400:
        raise InvalidRequestError(
            f"{url.host} answers with a redirect, which is not followed: give the image's own URL"
        )
    if response.status != 200:
        raise InvalidRequestError(f"{url.host} answers with status {response.status}: there is no image at this URL")
    too_large = InvalidRequestError(f"the image from {url.host} has more than {max_bytes} bytes; use a smaller one")
    if (response.length or 0) > max_bytes:
        raise too_large
    expected, pieces, size = response.length, list[bytes](), 0
    while piece := response.read1(_READ_BYTES):
        pieces.append(piece)
        size += len(piece)
        if size > max_bytes:
            raise too_large
    if expected is not None and size != expected:
        raise InvalidRequestError(f"{url.host} has sent {size} of the {expected} bytes of the image")
    return np.frombuffer(b"".join(pieces), dtype=np.uint8)


def _cut(connection: _Pinned) -> None:
    """In a thread of its own: let whoever reads from the connection go on at once."""
    if connection.stream is not None:
        with contextlib.suppress(OSError):  # it is closed already
            connection.stream.shutdown(socket.SHUT_RDWR)
