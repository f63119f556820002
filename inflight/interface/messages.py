"""The messages between an executor and its workers after the start: commands, and the replies to them.

A command has an epoch and an id. After a fault the ranks begin a new epoch (executor/recovery.py). Then the ranks drop commands
of older epochs, and the executor drops replies of older epochs. A reply has the epoch and the `key` of its command. The key is
("step", step id) or ("call", call id).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from inflight.interface.step import GrammarOutput, ModelRunnerOutput, SchedulerOutput

ReplyKey = tuple[Literal["step", "call"], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecuteModel:
    """Run one step."""

    epoch: int
    scheduler_output: SchedulerOutput

    @property
    def key(self) -> ReplyKey:
        return "step", self.scheduler_output.step_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvideGrammarOutput:
    """The grammar masks (which tokens may be drawn) of a step whose `ExecuteModel` was sent before. Only the ranks of the last
    pipeline stage get this message. They do not reply to it."""

    epoch: int
    step_id: int
    grammar_output: GrammarOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcCall:
    """Call `method` of the worker. The arguments are plain data (see codec.py), typed Any because methods differ.

    If `beside` is set, the call waits for no step and no step waits for it, and the method may return a future.
    """

    epoch: int
    call_id: int
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    beside: bool = False

    @property
    def key(self) -> ReplyKey:
        return "call", self.call_id


@dataclass(frozen=True, slots=True, kw_only=True)
class AskActivity:
    """Asks a rank what it is doing. The rank answers at once with `WorkerActivity`, even while a command runs. An executor may
    also send this regularly, to find a rank that hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailure:
    """A worker's exception, as text.

    Attributes:
        is_echo: whether another rank is the cause: it has failed or does not answer.
        lost_ranks: the ranks that the worker has lost, if that is known.
    """

    type_name: str
    message: str
    traceback: str
    is_echo: bool = False
    lost_ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReply:
    """One rank's answer to one `ExecuteModel`: an output or a failure."""

    epoch: int
    step_id: int
    rank: int
    output: ModelRunnerOutput | None = None
    failure: WorkerFailure | None = None

    def __post_init__(self) -> None:
        if (self.output is None) == (self.failure is None):
            raise ValueError("a StepReply must have either an output or a failure; it has both or neither")

    @property
    def key(self) -> ReplyKey:
        return "step", self.step_id


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcReply:
    """One rank's answer to one `RpcCall`. `value` is what the method returned."""

    epoch: int
    call_id: int
    rank: int
    value: Any = None
    failure: WorkerFailure | None = None

    @property
    def key(self) -> ReplyKey:
        return "call", self.call_id


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerActivity:
    """One rank's answer to `AskActivity`. `text` names the steps or the call that the rank runs, then their phase:
    "running step 7: forward of step 7 for 3.9 s". `is_waiting` says whether the rank waits for another rank now."""

    rank: int
    text: str
    is_waiting: bool


WorkerCommand = ExecuteModel | ProvideGrammarOutput | RpcCall
WorkerReply = StepReply | RpcReply | WorkerActivity
