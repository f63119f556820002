"""What an executor and its workers say to each other. Every message carries the epoch and the id it is about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inflight.interface.step import GrammarOutput, KVConnectorOutput, ModelRunnerOutput, SchedulerOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecuteModel:
    """Run one step. Its id is `scheduler_output.step_id`."""

    epoch: int
    scheduler_output: SchedulerOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvideGrammarOutput:
    """The masks of a step sent before; to the ranks of the last stage, and not answered."""

    epoch: int
    step_id: int
    grammar_output: GrammarOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcCall:
    """Call `method` of the worker. Arguments are plain data (Any: the method says what it takes)."""

    epoch: int
    call_id: int
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskActivity:
    """Asks a rank what it is doing. It answers at once with `WorkerActivity`, even while a command runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailure:
    """An exception on a worker, as text. `is_echo`: the worker failed because another rank left or is silent."""

    type_name: str
    message: str
    traceback: str
    is_echo: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReply:
    """One rank's answer to one `ExecuteModel`: its output, or why there is none."""

    epoch: int
    step_id: int
    rank: int
    result: ModelRunnerOutput | WorkerFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcReply:
    """One rank's answer to one `RpcCall`. `value` is whatever the method returned."""

    epoch: int
    call_id: int
    rank: int
    value: Any = None
    failure: WorkerFailure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEvent:
    """What a rank reports unasked, because it ended while no step ran. It wakes an engine that is idle."""

    epoch: int
    rank: int
    kv_connector_output: KVConnectorOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerActivity:
    """One rank's answer to `AskActivity`, as text: "running step 7: forward of step 7 for 3.9 s". `is_waiting`: the rank
    waits for another rank."""

    rank: int
    text: str
    is_waiting: bool


WorkerCommand = ExecuteModel | ProvideGrammarOutput | RpcCall
WorkerReply = StepReply | RpcReply | WorkerEvent | WorkerActivity
