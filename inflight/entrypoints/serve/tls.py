"""`make_ssl_context`: makes a TLS context from the files in the settings. If a file is wrong, the error names the file."""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Iterator
from pathlib import Path

from inflight.entrypoints.serve.settings import ServerSettings
from inflight.errors import ConfigError


def make_ssl_context(settings: ServerSettings) -> ssl.SSLContext | None:
    """Returns the TLS context for the settings, or None if `ssl_certfile` is None.

    Raises:
        ConfigError: a file is missing or not PEM, or the key does not belong to the certificate.
    """
    if settings.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        path = getattr(settings, name)
        try:
            if path is not None:
                Path(path).open("rb").close()  # ssl's own error does not name the file
        except OSError as error:
            raise ConfigError(f"{name}={path!r} cannot be read: {error.strerror}") from error

    _load_chain(context, settings, settings.ssl_certfile, settings.ssl_keyfile)
    if settings.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(settings.ssl_ca_certs)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"ssl_ca_certs={settings.ssl_ca_certs!r} holds no certificates in PEM") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def reload_certificate(context: ssl.SSLContext, settings: ServerSettings) -> None:
    """Read the certificate and its key again, for new connections. `ssl_ca_certs` is not read again.

    Raises:
        ConfigError: a file is wrong. `context` is unchanged.
    """
    # Test the files in another context first. If the new key is wrong, `load_cert_chain` fails, but leaves the new certificate
    # in its context, together with the old key. Both contexts read copies, because a file may change meanwhile.
    with contextlib.ExitStack() as copies:
        files = [copies.enter_context(_copy(settings, name)) for name in ("ssl_certfile", "ssl_keyfile")]
        _load_chain(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), settings, *files)
        _load_chain(context, settings, *files)


@contextlib.contextmanager
def _copy(settings: ServerSettings, name: str) -> Iterator[str | None]:
    """The path of a copy of the file, in memory. None if the setting is None."""
    path = getattr(settings, name)
    if path is None:
        yield None
        return
    with open(os.memfd_create(name), "wb") as file:
        try:
            file.write(Path(path).read_bytes())
        except OSError as error:
            raise ConfigError(f"{name}={path!r} cannot be read: {error.strerror}") from error
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"


def _load_chain(context: ssl.SSLContext, settings: ServerSettings, certfile: str | None, keyfile: str | None) -> None:
    """Loads the certificate and its key from these files, which are those of the settings, or copies of them."""
    assert certfile is not None

    def refuse_password() -> str:
        raise ConfigError("the private key is encrypted with a password; give an ssl_keyfile without a password")

    try:
        context.load_cert_chain(certfile, keyfile, refuse_password)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"ssl_certfile={settings.ssl_certfile!r} and ssl_keyfile={settings.ssl_keyfile!r} must hold a certificate and its "
            f"private key in PEM, but cannot be loaded: {getattr(error, 'reason', None) or error}"
        ) from error
