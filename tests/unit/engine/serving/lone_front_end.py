"""An `AsyncLLM` without an engine: the test plays the engine's part. It starts in a millisecond."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from inflight.config.fault_tolerance import FaultToleranceConfig
from inflight.config.reasoning import ReasoningConfig
from inflight.engine.request.image_support import NoImages
from inflight.engine.request.input_processor import InputProcessor
from inflight.engine.request.processed import ProcessedRequest
from inflight.engine.serving.admission import QueueLimits
from inflight.engine.serving.async_llm import AsyncLLM
from inflight.engine.serving.engine_client import EngineClient, EngineListener, EngineState
from inflight.engine.serving.engine_sockets import EngineSockets
from inflight.engine.serving.replicas import Replicas
from inflight.engine.serving.running_requests import RunningRequests
from inflight.interface.codec import Message
from inflight.interface.request import EngineCoreOutput, EngineCoreRequest, FinishReason
from inflight.interface.serving import AddRequest, EngineOutputs, EngineReady
from inflight.interface.statistics import SchedulerStats
from inflight.metrics.observer import EngineObserver
from tests.support.fakes_tokenizer import byte_tokenizer

DRAWN = 99  # the most tokens of a sequence that `request` makes


class RecordingClient(EngineClient):
    """Keeps what would go to the engine. `calls`: of "pause" and "resume", in order. `ended`: reasons given to `end`."""

    def __init__(
        self, listener: EngineListener, limits: QueueLimits | None = None, max_num_seqs: int = 1, index: int = 0
    ) -> None:
        shape: dict[str, Any] = {"index": index, "limits": limits, "max_num_seqs": max_num_seqs}
        super().__init__(EngineSockets(), FaultToleranceConfig(), listener, **shape)
        self.state = EngineState.CONNECTED
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
    engine, clients = front_end_of(1, max_num_seqs, limits)
    return engine, clients[0]


def front_end_of(
    num_replicas: int, max_num_seqs: int = 16, limits: QueueLimits | None = None
) -> tuple[AsyncLLM, list[RecordingClient]]:
    """To be called on the event loop."""
    config = SimpleNamespace(
        scheduler=SimpleNamespace(max_num_seqs=max_num_seqs),
        cache=SimpleNamespace(block_size=16),
        execute_model_timeout_seconds=60.0,
        fault_tolerance=FaultToleranceConfig(),
        reasoning=ReasoningConfig(),
        model=SimpleNamespace(
            name="lone",
            folder=Path("nowhere"),
            load_format="dummy",
            max_model_len=2048,
            dtype="float32",
            architecture=SimpleNamespace(vocab_size=256, vision=None),
        ),
    )
    parts: dict[str, Any] = {"chat_template": None, "default_params": None, "default_max_tokens": None}
    processor = SimpleNamespace(config=config, tokenizer=byte_tokenizer(), images=NoImages(), **parts)
    clients: list[RecordingClient] = []

    def make(listener: EngineListener) -> list[RecordingClient]:
        clients.extend(RecordingClient(listener, limits, max_num_seqs, index) for index in range(num_replicas))
        return clients

    return front_end(cast("InputProcessor", processor), make), clients


def front_end(
    processor: InputProcessor,
    make_clients: Callable[[EngineListener], Sequence[EngineClient]],
    observers: Sequence[EngineObserver] = (),
) -> AsyncLLM:
    """One whose engines are these clients, which are connected. To be called on the event loop."""
    requests = RunningRequests(processor.tokenizer, observers)
    replicas = Replicas(requests, processor.config, make_clients)
    ready = [EngineReady(front_end=0, num_kv_cache_tokens=2**16)] * len(replicas.engines)
    return AsyncLLM(processor, requests, replicas, ready)


def answer(
    engine: AsyncLLM, requests: list[ProcessedRequest], token_ids: list[int], finish: FinishReason | None = None
) -> None:
    """The engine sends these tokens for every sequence of the requests, which are running."""
    ids = [
        sequence.request_id
        for each in requests
        for sequence in engine._requests.outputs._requests[each.request_id].request.sequences
    ]
    outputs = [EngineCoreOutput(request_id=each, new_token_ids=tuple(token_ids), finish_reason=finish) for each in ids]
    engine._replicas.engines[0].take_outputs(EngineOutputs(outputs=tuple(outputs), num_received=0, stats=None))


def taken(client: RecordingClient) -> list[EngineCoreRequest]:
    """Returns the sequences that were sent to this replica since the last call."""
    found = [sequence for message in client.sent if isinstance(message, AddRequest) for sequence in message.sequences]
    client.sent.clear()
    return found


def names(client: RecordingClient) -> list[str]:
    return [sequence.request_id.split(".", 2)[2] for sequence in taken(client)]


def report(client: RecordingClient, num_received: int, **state: Any) -> None:  # Any: fields of SchedulerStats
    fields: dict[str, Any] = {"step_id": 0, "num_running": 0, "num_waiting": 0, "num_waiting_tokens": 0, **state}
    stats = SchedulerStats(kv_cache_usage=0.0, **fields)
    client.take_outputs(EngineOutputs(outputs=(), num_received=num_received, stats=stats))
