"""The messages between an executor and a worker process before the first command and at the end.

worker of another node  -- Hello -->  executor  -- Welcome | Refused -->       only over TCP, before the process is started
executor                -- StartUp -->  worker  -- Ready | StartUpFailed -->
executor                -- Stop -->  worker

Between the executors of an external launcher, which are all equal:

executor  -- Ready | StartUpFailed, then Submitted and replies in the order of the commands, Stop -->  every other executor
"""

from __future__ import annotations

from dataclasses import dataclass

from inflight.config.engine import EngineConfig
from inflight.interface.messages import WorkerFailure
from inflight.interface.worker import Rendezvous


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first frame of a TCP connection, one per rank. All fields but the token serve to find a mistyped option."""

    token: str
    schema: str  # `codec.schema_digest()`: the messages of two versions of Inflight may differ
    rank: int
    world_size: int
    nnodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The answer to a `Hello` that is accepted. `max_silence_seconds`: how long the link may be silent, on both sides."""

    max_silence_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The answer to a `Hello` that is not accepted. Node 0 closes the connection after it."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUp:
    """Construct `worker_class` ("module:class") with these arguments, and load the model."""

    config: EngineConfig
    rank: int
    worker_class: str
    rendezvous: Rendezvous | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The model is loaded: commands may come."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUpFailed:
    """The worker could not be imported, constructed or loaded; its process ends."""

    rank: int
    failure: WorkerFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End after the current command; commands that wait are not run. Between executors: this one submits no more commands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """This engine has given its worker a command. Every other engine must give its worker the same command."""

    name: str  # "step 5", or the called method
    digest: str  # of the plan; "" for a call, because its arguments may differ between ranks


StartUpMessage = Hello | Welcome | Refused | StartUp | Ready | StartUpFailed | Stop | Submitted
