"""The HTTP application over an engine that is played: no model, no socket, no process. A token is a byte of its text.

with serving() as api:
    answer = api.post("/v1/completions", {"prompt": "x"})
    assert answer.json["choices"][0]["text"] == "Hi!"
    assert api.core.sequences[0].priority == 0
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import tokenizers
from tokenizers.processors import TemplateProcessing

from inflight.engine.request.input_processor import InputProcessor
from inflight.engine.serving.admission import QueueLimits
from inflight.engine.serving.engine_client import EngineListener
from inflight.entrypoints.http.app import build_app
from inflight.entrypoints.serve.asgi import ASGIApp
from inflight.entrypoints.serve.engine_start import MAX_CALL_SEQUENCES
from inflight.entrypoints.serve.middlewares import wrap
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.errors import ErrorKind
from inflight.interface.codec import Message
from inflight.interface.request import EngineCoreOutput, EngineCoreRequest, FinishReason, LogprobsColumns
from inflight.interface.serving import AbortRequests, AddRequest, EngineOutputs
from inflight.metrics.log_lines import RequestLog
from inflight.metrics.observer import EngineObserver, FinishedRequest
from inflight.metrics.serving import ServingMetrics
from inflight.tokenizer.chat_template import ChatTemplate
from inflight.tokenizer.tokenizer import Tokenizer
from tests.conformance.configs import engine_config
from tests.support.fakes_tokenizer import BOS, BOS_ID, BYTE_VOCAB_SIZE, EOS, EOS_ID, USER, byte_tokenizer
from tests.support.request_parts import pooling_results, prompt_results
from tests.unit.engine.serving.lone_front_end import RecordingClient, front_end

MODEL, MAX_MODEL_LEN = "played", 200
FIM = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")  # the first of them is token BYTE_VOCAB_SIZE
VOCAB_SIZE = BYTE_VOCAB_SIZE + len(FIM)
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ more }}"
)
SETTINGS = ServerSettings(access_log="off", stream_keep_alive_interval=None)


def make_tokenizer(*more: str) -> Tokenizer:
    """The one of bytes. It puts a BOS in front."""
    backend = tokenizers.Tokenizer.from_str(byte_tokenizer().to_json())
    backend.add_special_tokens(list(more))
    backend.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    return Tokenizer(backend, {"bos_token": BOS, "eos_token": EOS}, [USER])


class PlayedCore(RecordingClient):
    """Answers each sequence with the next of `texts`, a byte at a time, unless it is `held`: then a test calls `emit`.

    The log-probability of a token is its id / -100. The second most probable token is the one after it.

    Attributes:
        sequences: those that came, in order; `prompts`: their prompts.
        aborted: the ids of those that are to end.
        resets: `reset_connector` of each call of `reset_prefix_cache`.
    """

    def __init__(
        self, listener: EngineListener, limits: QueueLimits | None = None, max_num_seqs: int = 16, index: int = 0
    ) -> None:
        super().__init__(listener, limits, max_num_seqs, index)
        self.texts: Sequence[str] = ("Hi!",)
        self.vector = (3.0, 4.0)
        self.held = False
        self.sequences: list[EngineCoreRequest] = []
        self.prompts: list[list[int]] = []
        self.aborted: list[str] = []
        self.resets: list[bool] = []

    def forget(self) -> None:
        """Forget what has come so far. All of it must have ended."""
        for each in (self.sequences, self.prompts, self.aborted, self.resets, self.sent):
            each.clear()

    def send(self, message: Message) -> None:
        super().send(message)
        if isinstance(message, AbortRequests):
            self.aborted += message.request_ids
        if isinstance(message, AddRequest):
            for sequence in message.sequences:
                text = self.texts[len(self.sequences) % len(self.texts)]
                self.sequences.append(sequence)
                self.prompts.append(message.prompt_token_ids.tolist())
                if not self.held:
                    index, loop = len(self.sequences) - 1, asyncio.get_running_loop()
                    if any(part.kind == "pooling" for part in sequence.parts):
                        loop.call_soon(self._pool, index)
                    else:
                        loop.call_soon(self._play, index, text, 0)

    async def reset_prefix_cache(self, *, reset_connector: bool = False) -> None:
        self.resets.append(reset_connector)

    def _play(self, index: int, text: str, at: int) -> None:
        tokens = [*text.encode(), EOS_ID]
        limit = self.sequences[index].sampling.max_tokens
        is_end = at + 1 == len(tokens)
        finish = FinishReason.STOP if is_end else FinishReason.LENGTH if at + 1 == limit else None
        self._emit(index, tokens[at : at + 1], finish, is_first=at == 0)
        if finish is None:
            asyncio.get_running_loop().call_soon(self._play, index, text, at + 1)

    def _pool(self, index: int) -> None:
        """The vector is `vector` times the number of tokens."""
        vector = np.array([self.vector], np.float32) * len(self.prompts[index])
        self._emit(index, [], FinishReason.STOP, is_first=True, parts=pooling_results(vector))

    def emit(self, index: int, text: str = "", finish: FinishReason | None = None, **more: Any) -> None:
        """The engine sends this text of a sequence. `more`: other members of the output."""
        self._emit(index, list(text.encode()), finish, is_first=False, **more)

    def fail(self, index: int, error: str, kind: ErrorKind, param: str = "") -> None:
        self.emit(index, "", FinishReason.ERROR, error=error, error_kind=kind, error_param=param)

    def _emit(self, index: int, tokens: list[int], finish: FinishReason | None, *, is_first: bool, **more: Any) -> None:
        sequence, params = self.sequences[index], self.sequences[index].sampling.params
        if params.logprobs is not None and tokens:
            more["logprobs"] = _columns(tokens, params.logprobs)
        if params.prompt_logprobs is not None and is_first:
            more["parts"] = prompt_results(_columns(self.prompts[index][1:], params.prompt_logprobs))
        made = EngineCoreOutput(
            request_id=sequence.request_id, new_token_ids=tuple(tokens), finish_reason=finish, **more
        )
        self.take_outputs(EngineOutputs(outputs=(made,), num_received=len(self.sequences), stats=None))


def _columns(tokens: Sequence[int], k: int) -> LogprobsColumns:
    ids = np.array([[token, *range(token, token + k)] for token in tokens], np.int32).reshape(-1, 1 + k)
    return LogprobsColumns(
        token_ids=ids, logprobs=(ids / -100).astype(np.float32), ranks=np.ones(len(tokens), np.int32)
    )


@dataclass
class Answer:
    """What a client sees. `parts`: the bodies as they were sent."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    is_over: bool = False

    @property
    def text(self) -> str:
        return b"".join(self.parts).decode()

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.text.splitlines()]

    @property
    def events(self) -> list[Any]:
        """The data of the events of a stream that has ended, without [DONE]."""
        found = [line.removeprefix("data: ") for line in self.text.splitlines() if line.startswith("data: ")]
        return [json.loads(each) for each in found if each != "[DONE]"]


class Exchange:
    """A request whose answer is on its way."""

    def __init__(self, api: Api, scope: dict[str, Any], body: bytes) -> None:
        self.answer = Answer()
        self._api = api
        self._gone = asyncio.Event()
        self._incoming = [{"type": "http.request", "body": body, "more_body": False}]
        self._task = api.runner.get_loop().create_task(self._run(scope))

    async def _run(self, scope: dict[str, Any]) -> None:
        try:
            await self._api.app(scope, self._receive, self._send)
        except AssertionError:
            raise
        except Exception:  # a server logs it; the answer says that something failed
            assert self.answer.status == 500

    async def _receive(self) -> Any:
        if not self._incoming:
            await self._gone.wait()
            return {"type": "http.disconnect"}
        return self._incoming.pop()

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            assert not self.answer.status
            self.answer.status = message["status"]
            self.answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            assert len(self.answer.headers) == len(message["headers"])
        else:
            assert self.answer.status and not self.answer.is_over
            self.answer.parts.append(message.get("body", b""))
            self.answer.is_over = not message.get("more_body", False)

    def until(self, condition: Callable[[], object]) -> None:
        self._api.until(condition)

    def leave(self) -> None:
        """The client hangs up. Returns when the server has ended the request."""
        self._gone.set()
        self._api.runner.run(asyncio.wait_for(self._task, 300))

    def end(self) -> Answer:
        """The whole answer."""
        self._api.runner.run(asyncio.wait_for(self._task, 300))
        return self.answer


MakeCores = Callable[[EngineListener], Sequence[PlayedCore]]


class Finished(EngineObserver):
    def __init__(self) -> None:
        self.requests: list[FinishedRequest] = []

    def request_finished(self, request: FinishedRequest) -> None:
        self.requests.append(request)


class Api:
    """Attributes: `cores`: the engine's replicas; `core`: the first of them; `finished`: the requests that have ended."""

    def __init__(self, runner: asyncio.Runner, settings: ServerSettings, make_cores: MakeCores, **more: Any) -> None:
        self.runner, self.settings = runner, settings
        self.metrics = ServingMetrics(MODEL, engines=range(more["num_replicas"]))
        finished = Finished()
        self.finished = finished.requests
        self.engine = front_end(more["processor"], make_cores, [self.metrics, finished])
        self.cores = cast("list[PlayedCore]", self.engine._replicas.engines)
        self.core = self.cores[0]
        app = cast("ASGIApp", build_app(self.engine, settings, metrics=self.metrics, request_log=more["request_log"]))
        self.app = wrap(app, settings, self.metrics.http_request) if more["wrapped"] else app

    def open(
        self, path: str, body: object = None, headers: Mapping[str, str] | None = None, *, method: str = "POST"
    ) -> Exchange:
        """Send a request. `body`: bytes, or what becomes JSON; None for no body."""
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        given = {
            "host": "localhost",
            **({} if body is None else {"content-type": "application/json"}),
            **(headers or {}),
        }
        sent = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in given.items()]
        path, _, query = path.partition("?")
        scope: dict[str, Any] = {
            "type": "http", "http_version": "1.1", "scheme": "http", "method": method, "path": path,
            "raw_path": path.encode(), "query_string": query.encode(), "client": ("127.0.0.1", 1), "root_path": "",
            "server": ("localhost", 8000), "headers": sent,
        }  # fmt: skip
        return Exchange(self, scope, content)

    def post(self, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> Answer:
        return self.open(path, body, headers).end()

    def get(self, path: str, headers: Mapping[str, str] | None = None, *, method: str = "GET") -> Answer:
        return self.open(path, None, headers, method=method).end()

    def asked(self, path: str, body: object, headers: Mapping[str, str] | None = None) -> EngineCoreRequest:
        """The one sequence that a request starts, which is answered."""
        before = len(self.core.sequences)
        answer = self.post(path, body, headers)
        assert answer.status == 200, answer.text
        (sequence,) = self.core.sequences[before:]
        return sequence

    def until(self, condition: Callable[[], object]) -> None:
        async def wait() -> None:
            async with asyncio.timeout(300):
                while not condition():
                    await asyncio.sleep(0.001)

        self.runner.run(wait())

    def do(self, action: Callable[[], object]) -> None:
        """Call it on the event loop."""

        async def call() -> None:
            action()

        self.runner.run(call())

    @property
    def num_running(self) -> int:
        return len(self.engine._requests)


@contextmanager
def serving(
    settings: ServerSettings = SETTINGS,
    *,
    num_replicas: int = 1,
    limits: QueueLimits | None = None,
    max_num_seqs: int = 16,
    tokenizer: Tokenizer | None = None,
    template: str = TEMPLATE,
    generation_config: Mapping[str, Any] | None = None,
    policy: str = "fcfs",
    wrapped: bool = True,
    skip_tokenizer_init: bool = False,
    request_log: RequestLog | None = None,
) -> Iterator[Api]:
    """`wrapped`: with the middlewares."""
    config = engine_config(name=MODEL)
    architecture = replace(config.model.architecture, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_ID,))
    config = replace(
        config,
        model=replace(config.model, max_model_len=MAX_MODEL_LEN, architecture=architecture),
        scheduler=replace(config.scheduler, policy=policy, max_num_seqs=max_num_seqs),
    )
    chosen, parsed = tokenizer or make_tokenizer(*FIM), ChatTemplate({"default": template})
    with_texts = not skip_tokenizer_init
    processor = InputProcessor(
        config, chosen if with_texts else None, parsed if with_texts else None, generation_config, seed=0
    )

    async def make() -> Api:
        own = limits or QueueLimits(max_call_sequences=MAX_CALL_SEQUENCES)

        def make_cores(listener: EngineListener) -> list[PlayedCore]:
            return [PlayedCore(listener, own, max_num_seqs, index) for index in range(num_replicas)]

        more = {"processor": processor, "wrapped": wrapped, "request_log": request_log, "num_replicas": num_replicas}
        return Api(runner, settings, make_cores, **more)

    with asyncio.Runner() as runner:
        api = runner.run(make())
        try:
            yield api
        finally:
            runner.run(api.engine.close())
