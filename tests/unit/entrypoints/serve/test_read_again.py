"""Keys and certificates that are read again while they are in use: a wrong file changes nothing."""

from __future__ import annotations

import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import pytest

from inflight.entrypoints.serve import tls
from inflight.entrypoints.serve.api_keys import ApiKeys
from inflight.entrypoints.serve.server import Server
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.entrypoints.serve.shutdown import Shutdown
from inflight.entrypoints.serve.tls import make_ssl_context, reload_certificate
from inflight.errors import ConfigError
from tests.support.certificates import make_certificate, needs_openssl


def test_keys_of_the_file_are_replaced_and_other_keys_stay(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("first-key-1\n")
    keys = ApiKeys(("given-key",), str(file))
    given_twice = ApiKeys(("first-key-1",), str(file))
    assert keys.accepts(b"given-key") and keys.accepts(b"first-key-1")
    file.write_text("second-key-2\nthird-key-3\n")
    assert keys.read_file_again() == given_twice.read_file_again() == 3
    assert given_twice.accepts(b"first-key-1"), "not only the file has it"
    assert keys.accepts(b"given-key") and keys.accepts(b"second-key-2") and not keys.accepts(b"first-key-1")


def test_keys_of_a_file_are_no_keys_of_the_settings(tmp_path: Path) -> None:
    """A key that is removed from the file while the server starts must not stay valid."""
    file = tmp_path / "keys"
    file.write_text("first-key-1\n")
    settings = ServerSettings(api_key_file=str(file))
    assert settings.api_keys == () and settings.asks_for_key and settings.accepted_hosts == ("*",)
    file.write_text("second-key-2\n")
    keys = ApiKeys(settings.api_keys, settings.api_key_file)
    assert keys.accepts(b"second-key-2") and not keys.accepts(b"first-key-1")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("# none\n", "holds no key"),
        ("second-key-2\nshort\n", "shorter than 8"),
        ("second-key-ä", "printable ASCII"),
        (None, "No such file"),
    ],
)
def test_a_wrong_key_file_keeps_the_keys(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "keys"
    file.write_text("first-key-1\n")
    keys = ApiKeys((), str(file))
    file.unlink()
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=message) as error:
        keys.read_file_again()
    assert "second" not in str(error.value)
    assert keys.accepts(b"first-key-1") and not keys.accepts(b"second-key-2")


def shown_certificate(context: ssl.SSLContext) -> bytes:
    """What a new client of this server sees."""
    ours, theirs = socket.socketpair()

    def serve() -> None:
        with context.wrap_socket(ours, server_side=True) as stream:
            stream.recv(1)

    thread = threading.Thread(target=serve)
    thread.start()
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    with trusting.wrap_socket(theirs) as stream:
        found = stream.getpeercert(binary_form=True)
        stream.sendall(b"x")
    thread.join()
    assert found is not None
    return found


@needs_openssl
def test_a_certificate_is_replaced_and_a_wrong_pair_keeps_the_old_one(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    settings = ServerSettings(ssl_certfile=certificate, ssl_keyfile=key)
    context = make_ssl_context(settings)
    assert context is not None
    first = shown_certificate(context)
    make_certificate(tmp_path)
    reload_certificate(context, settings)
    second = shown_certificate(context)
    assert second != first
    other = tmp_path / "other"
    other.mkdir()
    Path(key).write_text(Path(make_certificate(other)[1]).read_text())  # the key of another certificate
    with pytest.raises(ConfigError, match="private key"):
        reload_certificate(context, settings)
    assert shown_certificate(context) == second


@needs_openssl
def test_files_that_change_while_they_are_read_again_do_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key is half written after the first context has read it, so the second context must not read the file."""
    certificate, key = make_certificate(tmp_path)
    settings = ServerSettings(ssl_certfile=certificate, ssl_keyfile=key)
    context = make_ssl_context(settings)
    assert context is not None
    first = shown_certificate(context)
    make_certificate(tmp_path)
    load = ssl.SSLContext.load_cert_chain

    class Context(ssl.SSLContext):
        def load_cert_chain(self, *files: Any) -> None:
            load(self, *files)
            Path(key).write_text(Path(key).read_text()[:100])

    monkeypatch.setattr(tls.ssl, "create_default_context", lambda _purpose: Context(ssl.PROTOCOL_TLS_SERVER))
    reload_certificate(context, settings)
    assert shown_certificate(context) != first


@needs_openssl
@pytest.mark.parametrize("wrong", ["certificate", "keys"])
def test_a_wrong_file_of_one_kind_does_not_keep_the_other_kind_from_being_read(tmp_path: Path, wrong: str) -> None:
    certificate, key = make_certificate(tmp_path)
    keys = tmp_path / "keys"
    keys.write_text("first-key-1\n")
    settings = ServerSettings(
        ssl_certfile=certificate, ssl_keyfile=key, api_key_file=str(keys), access_log="off", api_keys=()
    )
    context = make_ssl_context(settings)
    assert context is not None

    async def start() -> Any:
        raise AssertionError("it is not started")

    server: Any = Server(settings, context, start, Shutdown(1.0))
    first = shown_certificate(context)
    make_certificate(tmp_path)
    keys.write_text("second-key-2\n")
    Path(certificate if wrong == "certificate" else keys).write_text("")
    server._read_files_again()
    assert (shown_certificate(context) != first) == (wrong == "keys")
    assert server._keys.accepts(b"second-key-2") == (wrong == "certificate")


def test_a_server_reads_keys_again(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first-key-1\n")
    settings = ServerSettings(api_key_file=str(keys), access_log="off")

    async def start() -> Any:
        raise AssertionError("it is not started")

    server: Any = Server(settings, None, start, Shutdown(1000.0))
    keys.write_text("second-key-2\n")
    server._read_files_again()
    assert server._keys.accepts(b"second-key-2") and not server._keys.accepts(b"first-key-1")
