"""The health check of the images: asks the server of this container for /health. Exit code 0 if the answer is 200, else 1.

Address and TLS are those with which the server was started: the options in the command line of process 1, the INFLIGHT_SERVE_*
variables, and the file of --config, in this order.
"""

import http.client
import os
import re
import socket
import ssl
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

SECONDS = 4.0
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class Address(NamedTuple):
    host: str
    port: int
    uds: str | None
    has_tls: bool
    wants_certificate: bool  # the server answers only clients that have a certificate


def address_of(arguments: Sequence[str], environment: Mapping[str, str]) -> Address:
    """Where a server listens that was started with these arguments and variables."""

    def given(name: str) -> str | None:
        wanted, found = f"--{name.replace('_', '-')}", None
        for i, argument in enumerate(arguments):
            flag, equals, value = argument.partition("=")
            if flag.replace("_", "-") == wanted:
                found = value if equals else "".join(arguments[i + 1 : i + 2])
        return found or environment.get(f"INFLIGHT_SERVE_{name.upper()}") or None

    path = given("config")
    text = "" if path is None else Path(path).expanduser().read_text(encoding="utf-8")

    def setting(name: str) -> str | None:
        if (value := given(name)) is not None:
            return value
        lines = re.findall(rf"^{name.replace('_', '[_-]')}:[ \t]*(.*?)[ \t]*(?: #.*)?$", text, re.MULTILINE)
        return (lines[-1].strip("\"'") if lines else "") or None

    host = setting("host") or "127.0.0.1"
    return Address(
        host=_EVERYWHERE.get(host, host),
        port=int(setting("port") or 8000),
        uds=setting("uds"),
        has_tls=setting("ssl_certfile") is not None,
        wants_certificate=setting("ssl_ca_certs") is not None,
    )


def status_of(address: Address) -> int:
    """The status of /health. 200 after a TLS handshake if the server would not answer a client without a certificate.

    Raises:
        OSError, http.client.HTTPException: the server does not answer.
    """
    if address.uds is None:
        connection = socket.create_connection((address.host, address.port), SECONDS)
    else:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(SECONDS)
        connection.connect(address.uds)
    with connection:
        if address.has_tls:
            context = ssl.create_default_context()
            context.check_hostname = False  # the certificate is for the server's name, and this is its own machine
            context.verify_mode = ssl.CERT_NONE
            connection = context.wrap_socket(connection)
            if address.wants_certificate:
                return 200
        client = http.client.HTTPConnection("localhost")
        client.sock = connection
        client.request("GET", "/health")
        return client.getresponse().status


def main() -> int:
    arguments = Path("/proc/1/cmdline").read_text(encoding="utf-8").split("\0")
    try:
        status = status_of(address_of(arguments, os.environ))
    except (OSError, ValueError, http.client.HTTPException) as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    print(f"/health: {status}")
    return int(status != 200)


if __name__ == "__main__":
    sys.exit(main())
