"""A small OpenAI server with known timing, on a thread of its own: tokens at fixed times, and failures on demand."""

from __future__ import annotations

import asyncio
import json
import threading
from types import TracebackType
from typing import Any, Self

from aiohttp import web

FIRST_SECONDS, TOKEN_SECONDS = 0.05, 0.02
VOCABULARY = list(range(100, 140))


class FakeServer:
    """Answers every request with `max_tokens` tokens "x": the first after 50 ms, the others 20 ms apart.

    `fault` of the n-th request, counted from 0: "status", "stream", "abort", "cut", "no end" or "no usage".
    """

    def __init__(self, faults: dict[int, str] | None = None) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""
        self._faults = faults or {}
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(300)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(app)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake/model", "object": "model"}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"tokens": VOCABULARY, "count": len(VOCABULARY)})

    async def _detokenize(self, request: web.Request) -> web.Response:
        tokens = (await request.json())["tokens"]
        return web.json_response({"prompt": " ".join(map(str, tokens))})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        fault = self._faults.get(len(self.bodies), "")
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if fault == "status":
            return web.json_response({"error": {"message": "the queue is full"}}, status=503)
        is_chat = "messages" in body
        prompt = body["messages"][0]["content"].split() if is_chat else body["prompt"]
        num_tokens = body.get("max_completion_tokens" if is_chat else "max_tokens")
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        if is_chat:
            await _send(answer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for index in range(num_tokens):
            await asyncio.sleep(TOKEN_SECONDS if index else FIRST_SECONDS)
            piece = {"delta": {"content": "x"}} if is_chat else {"text": "x"}
            await _send(answer, {"choices": [{"index": 0, "finish_reason": None, **piece}]})
            if fault == "stream":
                await _send(answer, {"error": {"message": "the engine is gone", "code": 500}})
            if fault == "cut":
                assert request.transport is not None
                request.transport.abort()
                return answer
        reason = "abort" if fault == "abort" else "length"
        await _send(answer, {"choices": [{"index": 0, "text": "", "finish_reason": reason}]})
        if fault != "no usage":
            usage = {"prompt_tokens": len(prompt), "completion_tokens": num_tokens}
            await _send(answer, {"choices": [], "usage": usage})
        if fault != "no end":
            await answer.write(b"data: [DONE]\n\n")
        return answer


async def _send(answer: web.StreamResponse, event: dict[str, Any]) -> None:
    await answer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
