"""Servers that hold KV blocks in tests: Redis, an S3 of moto, and an HTTP server that answers what a test says."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.waits import wait_until


class RedisServer(NamedTuple):
    url: str
    process: subprocess.Popen[bytes]
    client: Any  # redis.Redis: its methods have no exact types


@contextmanager
def redis_server(folder: Path, *options: str, password: str = "") -> Iterator[RedisServer]:
    """A server that listens at a socket in `folder`, and saves nothing. Skips the test where there is none."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed")
    import redis

    path = f"/tmp/inflight-{os.getpid()}-{os.urandom(4).hex()}.sock"  # the paths of sockets are short
    secret = ("--requirepass", password) if password else ()
    command = [program, "--port", "0", "--unixsocket", path, "--save", "", "--dir", str(folder), *secret, *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    client = redis.Redis(unix_socket_path=path, password=password or None)

    def answers() -> bool:
        with suppress(redis.ConnectionError):
            return bool(client.ping())
        return False

    try:
        wait_until(answers)
        yield RedisServer(f"unix://{f':{password}@' if password else ''}{path}", process, client)
    finally:
        client.close()
        process.kill()
        process.wait()
        with suppress(FileNotFoundError):
            os.unlink(path)


@contextmanager
def s3_server() -> Iterator[dict[str, Any]]:  # Any: options as in JSON
    """A moto server. Yields the options of an obj tier."""
    script = (
        "import sys; from moto.moto_server.werkzeug_app import DomainDispatcherApplication as A, create_backend_app as c;"
        "from werkzeug.serving import make_server; s = make_server('127.0.0.1', 0, A(c), threaded=True);"
        "print(s.server_port, flush=True); s.serve_forever()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            yield s3_options(int(process.stdout.readline()))
        finally:
            process.kill()


def new_bucket(options: dict[str, Any]) -> str:
    """Makes a bucket. Returns its name."""
    bucket = f"b{os.urandom(10).hex()}"
    request = urllib.request.Request(f"{options['endpoint']}/{bucket}", method="PUT")
    urllib.request.urlopen(request, timeout=300).close()
    return bucket


def direct_store(url: str, options: dict[str, Any]) -> Any:  # Any: obstore's union of stores
    from obstore.store import from_url

    config = {name: value for name, value in options.items() if name != "allow_http"}
    return from_url(url, config=config, client_options={"allow_http": True})  # type: ignore[call-overload]


def s3_options(port: int) -> dict[str, Any]:  # Any: options as in JSON
    return {
        "endpoint": f"http://127.0.0.1:{port}",
        "region": "us-east-1",
        "access_key_id": "someone",
        "secret_access_key": "very-secret",
        "allow_http": True,
    }


@contextmanager
def scripted_server(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """Listens at a port of this machine, which it yields. Each connection is given to `answer`, in a thread of its own."""
    kept: list[socket.socket] = []

    def serve(connection: socket.socket) -> None:
        with suppress(OSError):
            answer(connection)

    def accept() -> None:
        with suppress(OSError):
            while True:
                kept.append(listener.accept()[0])
                threading.Thread(target=serve, args=(kept[-1],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in kept:
                connection.close()


def http_answers(head: bytes, body: bytes = b"") -> Callable[[socket.socket], None]:
    """For `scripted_server`: answers each request with these bytes, and closes the connection."""

    def answer(connection: socket.socket) -> None:
        received = b""
        while b"\r\n\r\n" not in received:
            received += connection.recv(65536)
        length = re.search(rb"content-length: (\d+)", received.lower())
        missing = int(length[1]) - len(received.partition(b"\r\n\r\n")[2]) if length else 0
        while missing > 0:
            missing -= len(connection.recv(65536))
        connection.sendall(head + b"\r\nconnection: close\r\n\r\n" + body)
        connection.shutdown(socket.SHUT_RDWR)

    return answer
