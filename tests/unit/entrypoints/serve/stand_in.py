"""A script: a server whose engine only waits. `python stand_in.py SETTINGS_JSON START_SECONDS` prints its port, then serves.

POST /stream streams `?tokens=N` words, 20 ms apart, and with `&until=PATH` more words until this file is there. Then it streams
"[DONE]"; drained, it ends with "aborted"; of a dead engine, with "dead". POST /kill kills the engine. POST /hang starts a
thread that never ends. POST /read reads its body. With CLOSE_SECONDS in the environment the engine's end takes that long;
CUT_SECONDS and END_SECONDS replace the server's. At the end "closed" is printed: the engine was closed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from typing import Any
from urllib.parse import parse_qs

from inflight.entrypoints.serve import server
from inflight.entrypoints.serve.asgi import Receive, Scope, Send, send_json
from inflight.entrypoints.serve.listener import Listener
from inflight.entrypoints.serve.server import Server
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.entrypoints.serve.shutdown import END_SECONDS, Shutdown
from inflight.entrypoints.serve.tls import make_ssl_context
from inflight.errors import EngineDeadError


class StandInEngine:
    def __init__(self) -> None:
        self.num_running = 0
        self.aborting = asyncio.Event()
        self.is_dead = False
        self.app = make_app(self)
        self.engine = self.metrics = self

    async def check_health(self) -> None:
        if self.is_dead:
            raise EngineDeadError("the engine's process is gone")

    async def drain(self, timeout: float) -> None:
        end = asyncio.get_running_loop().time() + timeout
        while self.num_running and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.01)
        self.aborting.set()

    async def close(self) -> None:
        print("closing", file=sys.stderr, flush=True)
        await asyncio.sleep(float(os.environ.get("CLOSE_SECONDS", "0")))
        print("closed", flush=True)

    def http_request(self, route: str, status: int, seconds: float) -> None:
        pass

    def request_refused(self, reason: str) -> None:
        print("refused:", reason, flush=True)

    def engine_died(self) -> None:
        print("died", flush=True)


def make_app(engine: StandInEngine) -> Any:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/hang":
            hanging = os.pipe()
            asyncio.get_running_loop().run_in_executor(None, os.read, hanging[0], 1)
        if scope["path"] == "/kill":
            engine.is_dead = True
        while scope["path"] == "/read" and (await receive()).get("more_body"):
            pass
        if scope["path"] != "/stream":
            await send_json(send, 200, {"path": scope["path"]})
            return
        query = parse_qs(scope["query_string"].decode())
        tokens, until = int(query["tokens"][0]), query.get("until", ["."])[0]
        engine.num_running += 1
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            ending = b"[DONE]"
            num_sent = 0
            while num_sent < tokens or not os.path.exists(until):
                num_sent += 1
                await send({"type": "http.response.body", "body": b"word ", "more_body": True})
                await asyncio.sleep(0.02)
                if engine.is_dead or engine.aborting.is_set():
                    ending = b"dead" if engine.is_dead else b"aborted"
                    break
            await send({"type": "http.response.body", "body": ending})
        finally:
            engine.num_running -= 1

    return app


async def main() -> int:
    logging.basicConfig()
    logging.getLogger("inflight").setLevel("INFO")
    values: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in json.loads(sys.argv[1]).items()
    }
    settings = ServerSettings(**values)

    async def start() -> Any:
        await asyncio.sleep(float(sys.argv[2]))
        return StandInEngine()

    if "CUT_SECONDS" in os.environ:
        server.CUT_SECONDS = float(os.environ["CUT_SECONDS"])  # type: ignore[attr-defined]
    shutdown = Shutdown(settings.shutdown_timeout, float(os.environ.get("END_SECONDS", END_SECONDS)))
    listener = Listener(settings)
    print(listener.port, flush=True)
    try:
        with shutdown.on_signals():
            return await Server(settings, make_ssl_context(settings), start, shutdown).run(listener.socket)
    except EngineDeadError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        listener.close()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
