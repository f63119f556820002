"""`ScriptedChat`: the page's files with endpoints that a test plays, on a free port."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn

from inflight.entrypoints.page.page_files import PageFiles
from inflight.entrypoints.serve.asgi import Message, Receive, Scope, Send, send_json

Delta = Mapping[str, Any]  # Any: JSON
CUT = {"cut": True}  # in a script: the connection ends here


class ScriptedChat:
    """An ASGI app.

    Attributes:
        script: request -> the deltas of the answer, in order. A number is a pause in seconds.
        requests: the bodies that came to /v1/chat/completions.
        paths: all paths that were asked for, with their query strings.
        is_ready: whether /ready says so.
    """

    def __init__(self) -> None:
        self.script: Callable[[dict[str, Any]], list[Delta | float]] = lambda _: [{"content": "Hello."}]
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.modalities = ["text"]

    def say(self, *deltas: Delta | float | str) -> None:
        """Answer each request with these deltas; a string is content."""
        made = [{"content": each} if isinstance(each, str) else each for each in deltas]
        self.script = lambda _: list(made)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(f"{scope['path']}?{scope['query_string'].decode()}")
        match scope["path"]:
            case "/ready":
                await send_json(send, 200, {"status": "ready"})
            case "/v1/models":
                card = {"id": "played", "max_model_len": 4096, "input_modalities": self.modalities}
                await send_json(send, 200, {"data": [card, {**card, "id": "played-too"}]})
            case "/v1/chat/completions":
                await self._answer(json.loads(await _body(receive)), send)
            case _:
                await send_json(send, 404, {"error": {"message": "not found"}})

    async def _answer(self, request: dict[str, Any], send: Send) -> None:
        self.requests.append(request)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        usage = {"prompt_tokens": 7, "completion_tokens": 0}
        last: dict[str, Any] = {}
        for delta in self.script(request):
            if isinstance(delta, float | int):
                await asyncio.sleep(delta)
            elif delta is CUT:
                return  # uvicorn closes the connection, because the body has not ended
            elif "finish" in delta:
                last = {"finish_reason": delta["finish"]}
            elif "event" in delta:
                await _send_event(send, delta["event"])
            else:
                usage["completion_tokens"] += 1
                await _send_event(
                    send, {"choices": [{"index": 0, "delta": delta, "finish_reason": None}], "usage": usage}
                )
        last = last or {"finish_reason": "stop"}
        await _send_event(send, {"choices": [{"index": 0, "delta": {}, **last}], "usage": usage})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def _send_event(send: Send, event: object) -> None:
    await send({"type": "http.response.body", "body": b"data: %s\n\n" % json.dumps(event).encode(), "more_body": True})


async def _body(receive: Receive) -> bytes:
    body = b""
    while True:
        message: Message = await receive()
        body += bytes(message.get("body", b""))
        if not message.get("more_body"):
            return body


@contextmanager
def scripted_chat() -> Iterator[tuple[ScriptedChat, str]]:
    """The app, and its address."""
    app = ScriptedChat()
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(PageFiles(app), log_level="critical", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield app, f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        server.force_exit = server.should_exit = True
        thread.join()
        listener.close()
