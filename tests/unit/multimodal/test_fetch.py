"""Images from web servers: what is fetched, and which servers, addresses and answers are refused."""

from __future__ import annotations

import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from inflight.errors import InvalidRequestError
from inflight.multimodal.fetch import Address, WebUrl, fetch, is_public, read_web_url
from tests.support.certificates import make_certificate

CONTENT = bytes(range(256)) * 20
ALLOWED = frozenset({"images.example", "localhost", "127.0.0.1", "xn--bcher-kva.example", "2130706433", "::1"})
SOON = 60.0


def answer(status: str = "200 OK", body: bytes = CONTENT, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", *(headers or (f"Content-Length: {len(body)}",)), "Connection: close", "", ""]
    return "\r\n".join(lines).encode() + body


@contextmanager
def served(respond: Callable[[socket.socket, bytes], None], context: ssl.SSLContext | None = None) -> Iterator[int]:
    """A server that calls `respond` with each connection and the head of its request. Yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:  # the listener is closed
                    return
                with connection:
                    try:
                        stream = connection if context is None else context.wrap_socket(connection, server_side=True)
                        head = b""
                        while b"\r\n\r\n" not in head:
                            head += stream.recv(4096) or b"\r\n\r\n"
                        respond(stream, head)
                        stream.close()
                    except OSError:  # the client has left
                        continue

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(SOON)


def sends(content: bytes) -> Callable[[socket.socket, bytes], None]:
    return lambda stream, _: stream.sendall(content)


def get(port: int, *, seconds: float = SOON, max_bytes: int = 10**6, path: str = "/a.png?b=1") -> bytes:
    url = read_web_url(f"http://localhost:{port}{path}", ALLOWED)
    return fetch(url, seconds, max_bytes, lambda _: True).tobytes()


def test_an_image_is_fetched_by_one_request_without_cookies() -> None:
    heads = []

    def respond(stream: socket.socket, head: bytes) -> None:
        heads.append(head.decode())
        stream.sendall(answer())

    with served(respond) as port:
        assert get(port) == CONTENT
    [head] = heads
    assert head.startswith("GET /a.png?b=1 HTTP/1.1\r\n")
    assert f"Host: localhost:{port}\r\n" in head
    assert "Cookie" not in head
    assert "Authorization" not in head


@pytest.mark.parametrize(
    "sent",
    [
        answer("200 OK", b"5\r\nabcde\r\n3\r\nfgh\r\n0\r\n\r\n", "Transfer-Encoding: chunked"),
        answer("200 OK", b"abcdefgh", "Content-Type: image/png"),  # the end of the stream is the end of the body
    ],
)
def test_an_answer_without_a_length(sent: bytes) -> None:
    with served(sends(sent)) as port:
        assert get(port) == b"abcdefgh"


@pytest.mark.parametrize(
    "sent",
    [
        *(
            answer(f"{status} Moved", b"", "Location: http://169.254.169.254/", "Content-Length: 0")
            for status in (301, 302, 303, 307, 308)
        ),
        *(answer(status) for status in ("404 Not Found", "500 Error", "204 No Content", "206 Partial Content")),
        answer("200 OK", CONTENT, f"Content-Length: {len(CONTENT) + 1}"),
        answer("200 OK", b"5\r\nabcde\r\n9\r\nfgh", "Transfer-Encoding: chunked"),
        answer("200 OK", b"zz\r\nabcde\r\n", "Transfer-Encoding: chunked"),
        b"no HTTP\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: a\r\n" * 200 + b"\r\n",
        b"",
    ],
)
def test_an_answer_without_an_image_is_refused(sent: bytes) -> None:
    with served(sends(sent)) as port, pytest.raises(InvalidRequestError):
        get(port)


@pytest.mark.parametrize("headers", [(), ("Content-Type: image/png",), ("Transfer-Encoding: chunked",)])
def test_too_many_bytes_are_refused(headers: Sequence[str]) -> None:
    body = b"1000\r\n" + bytes(0x1000) + b"\r\n0\r\n\r\n" if "chunked" in str(headers) else bytes(0x1000)
    with served(sends(answer("200 OK", body, *headers))) as port:
        assert len(get(port, max_bytes=0x1000)) == 0x1000
        with pytest.raises(InvalidRequestError, match="more than"):
            get(port, max_bytes=0xFFF)


@pytest.mark.parametrize("begin", [b"", b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_a_server_that_is_slow_has_a_deadline(begin: bytes) -> None:
    """One byte after the other: no single read takes long."""
    ends = threading.Event()

    def respond(stream: socket.socket, _: bytes) -> None:
        stream.sendall(begin)
        while not ends.wait(0.05):
            stream.sendall(b"a")

    with served(respond) as port:
        try:
            with pytest.raises(InvalidRequestError, match="within"):
                get(port, seconds=0.5)
        finally:
            ends.set()


def test_a_server_that_does_not_listen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(InvalidRequestError, match="cannot be fetched"):
        get(port)


def test_the_certificate_must_be_that_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = make_certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    with served(sends(answer()), context) as port:
        with pytest.raises(InvalidRequestError, match="CERTIFICATE_VERIFY_FAILED"):
            fetch(WebUrl("https", "localhost", port, "/"), SOON, 10**6, lambda _: True)
        monkeypatch.setenv("SSL_CERT_FILE", certificate)
        assert fetch(WebUrl("https", "127.0.0.1", port, "/"), SOON, 10**6, lambda _: True).tobytes() == CONTENT


# -- addresses ---------------------------------------------------------------------------------------------------------

PRIVATE = """
    127.0.0.1 127.1.2.3 0.0.0.0 10.0.0.1 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 192.0.2.1 198.18.0.1 224.0.0.1
    240.0.0.1 255.255.255.255 ::1 :: fe80::1 fc00::1 fd00:ec2::254 ff02::1 ::ffff:127.0.0.1 ::ffff:169.254.169.254
    64:ff9b::7f00:1 64:ff9b::a9fe:a9fe 64:ff9b:1::1 2002:7f00:1:: 2002:a00:1:: 2001:0:4136:e378:8000:63bf:80ff:fffe 2001:db8::1
    ::127.0.0.1 ::ffff:0:127.0.0.1 fec0::1 3fff::1 5f00::1 168.63.129.16
""".split()


@pytest.mark.parametrize("address", PRIVATE)
def test_an_address_that_is_not_public_is_not_asked(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_public(ipaddress.ip_address(address))
    resolve_to(monkeypatch, address)
    with pytest.raises(InvalidRequestError, match="not public"):
        fetch(read_web_url("http://images.example/a.png", ALLOWED), SOON, 10**6)


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"]
)
def test_an_address_of_the_internet_is_public(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


def test_one_private_address_among_public_ones_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to(monkeypatch, "1.1.1.1", "10.0.0.1")
    with pytest.raises(InvalidRequestError, match="not public"):
        fetch(read_web_url("http://images.example/a.png", ALLOWED), SOON, 10**6)


def test_the_address_that_was_checked_is_the_one_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that answers differently at the second time has no effect."""
    with served(sends(answer())) as port:
        answers = [["127.0.0.1"], ["203.0.113.7"]]
        checked: list[Address] = []

        def resolve(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
            if host != "images.example":  # `create_connection` resolves the address itself
                return resolved([host], port)
            return resolved(answers.pop(0), port)

        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        url = WebUrl("http", "images.example", port, "/")
        assert fetch(url, SOON, 10**6, lambda each: not checked.append(each)).tobytes() == CONTENT
    assert checked == [ipaddress.ip_address("127.0.0.1")]
    assert len(answers) == 1


def test_a_host_that_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: Any, **__: Any) -> list[Any]:
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(InvalidRequestError, match="cannot be found"):
        fetch(read_web_url("http://images.example/a.png", ALLOWED), SOON, 10**6)


def resolve_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, *_, **__: resolved(addresses, port))


def resolved(addresses: Sequence[str], port: int) -> list[Any]:
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]


# -- URLs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://images.example/a.png", WebUrl("https", "images.example", 443, "/a.png")),
        ("HTTP://IMAGES.example:8080", WebUrl("http", "images.example", 8080, "/")),
        ("http://images.example./a?b=c&d#e", WebUrl("http", "images.example", 80, "/a?b=c&d")),
        ("http://xn--bcher-kva.example/%C3%A4", WebUrl("http", "xn--bcher-kva.example", 80, "/%C3%A4")),
        ("http://[::1]:81/a", WebUrl("http", "::1", 81, "/a")),
    ],
)
def test_the_parts_of_a_url(url: str, expected: WebUrl) -> None:
    assert read_web_url(url, ALLOWED) == expected


@pytest.mark.parametrize(
    "url",
    [
        *"""
    http://example.com/ http://sub.images.example/ http://images.example.evil.com/ http://evilimages.example/
    http://images.example@evil.com/ http://user@images.example/ http://user:password@images.example/
    http://evil.com#images.example http://evil.com?images.example http://evil.com\\@images.example/
    http://images.example\\@evil.com/ http://169.254.169.254/latest/meta-data http://0x7f.1/ http://017700000001/ http://127.1/
    http://[::ffff:127.0.0.1]/ http://[::1 http:///a.png http://:80/ http: http://images.example:99999/ http://images.example:a/
    http://images.example/ä http://bücher.example/
    """.split(),
        "http://images.example/\u00a0",
        "http://images.example/a b",
        "http://images.example/\r\nHost: evil.com",
        "http://images.example/\x7f",
        "http://ima ges/",
    ],
)
def test_a_forbidden_or_wrong_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequestError):
        read_web_url(url, ALLOWED)


def test_without_domains_nothing_is_fetched() -> None:
    with pytest.raises(InvalidRequestError, match="--allowed-media-domains"):
        read_web_url("https://images.example/a.png", frozenset())


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "2130706433", "[::1]"])
def test_a_private_host_is_refused_even_if_it_is_named(host: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"not public|cannot be found"):
        fetch(read_web_url(f"http://{host}/a.png", ALLOWED), SOON, 10**6)
