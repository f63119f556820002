"""An `AsyncLLM` without an engine: the test plays the engine's part. It starts in a millisecond."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from inflight.config.fault_tolerance import FaultToleranceConfig
from inflight.engine.admission import QueueLimits
from inflight.engine.async_llm import AsyncLLM
from inflight.engine.engine_connection import EngineConnection
from inflight.engine.input_processor import InputProcessor, ProcessedRequest
from inflight.interface.codec import Message
from inflight.interface.request import EngineCoreOutput, FinishReason
from inflight.interface.serving import EngineOutputs, EngineReady
from inflight.interface.statistics import FaultStatus
from tests.fakes_tokenizer import byte_tokenizer


class RecordingClient:
    """Keeps what would go to the engine. `calls`: of "pause" and "resume", in order. `ended`: reasons given to `end`."""

    summary = lost_because = ""
    fault_status = FaultStatus()
    on_outputs: Any  # called by the tests' parts of the engine
    on_end: Any

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.calls: list[str] = []
        self.ended: list[str] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")

    def end(self, reason: str) -> None:
        self.ended.append(reason)


def lone_front_end(max_num_seqs: int = 16, limits: QueueLimits | None = None) -> tuple[AsyncLLM, RecordingClient]:
    """To be called on the event loop."""
    config = SimpleNamespace(
        scheduler=SimpleNamespace(max_num_seqs=max_num_seqs),
        cache=SimpleNamespace(block_size=16),
        execute_model_timeout_seconds=60.0,
        fault_tolerance=FaultToleranceConfig(),
        model=SimpleNamespace(
            name="lone",
            folder=Path("nowhere"),
            load_format="dummy",
            max_model_len=2048,
            dtype="float32",
            architecture=SimpleNamespace(vocab_size=256),
        ),
    )
    parts: dict[str, Any] = {"chat_template": None, "default_params": None, "default_max_tokens": None}
    processor = SimpleNamespace(config=config, tokenizer=byte_tokenizer(), **parts)
    client, ready = RecordingClient(), EngineReady(front_end=0, num_kv_cache_tokens=2**16)
    return AsyncLLM(cast("InputProcessor", processor), cast("EngineConnection", client), ready, limits=limits), client


def answer(
    engine: AsyncLLM, requests: list[ProcessedRequest], token_ids: list[int], finish: FinishReason | None = None
) -> None:
    """The engine sends these tokens for every sequence of the requests, which are running."""
    ids = [
        child.request_id for each in requests for child in engine._outputs._requests[each.request_id].request.children
    ]
    outputs = [EngineCoreOutput(request_id=each, new_token_ids=tuple(token_ids), finish_reason=finish) for each in ids]
    engine.on_outputs(EngineOutputs(outputs=tuple(outputs), num_received=0, stats=None))
