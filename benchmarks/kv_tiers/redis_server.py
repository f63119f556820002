"""`RedisServer`: a redis-server of one's own, which keeps everything in memory and ends with its context."""

from __future__ import annotations

import shutil
import subprocess
import time
from types import TracebackType
from typing import Self

from benchmarks.shared.free_port import free_port

START_SECONDS = 10.0


class RedisServer:
    """A context manager. `url` is its address.

    Raises:
        SystemExit: it does not start.
    """

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        options = {"bind": "127.0.0.1", "port": self.port, "save": "", "appendonly": "no", "loglevel": "warning"}
        arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        self._process = subprocess.Popen(["redis-server", *arguments], stdout=subprocess.DEVNULL, cwd="/")

    def __enter__(self) -> Self:
        import redis

        self._client = redis.Redis(port=self.port)
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                self._client.ping()
            except redis.ConnectionError:
                if time.monotonic() > end or self._process.poll() is not None:
                    self._process.kill()
                    raise SystemExit("redis-server does not start") from None
                time.sleep(0.02)
            else:
                return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(START_SECONDS)

    def forget_all(self) -> None:
        self._client.flushall()

    def keys(self) -> list[bytes]:
        return list(self._client.scan_iter(count=1000))


def why_no_redis() -> str:
    """Why there is no Redis on this machine; empty if there is one."""
    if shutil.which("redis-server") is None:
        return "redis-server is not installed"
    try:
        import redis  # noqa: F401
    except ImportError:
        return "the library redis is not installed"
    return ""
