"""The messages between an executor and a worker process before the first command, and at the end.

worker of another node  -- Hello -->  executor  -- Welcome | Refused -->       over TCP only, before the process is started
executor                -- StartUp -->  worker  -- Ready | StartUpFailed -->
executor                -- Stop -->  worker

If an external launcher (torchrun) has started the ranks, each rank has an executor of its own. These executors send each other:

executor  -- Ready | StartUpFailed; Submitted and replies, in the order of the commands; Stop -->  every other executor
"""

from __future__ import annotations

from dataclasses import dataclass

from inflight.config.engine import EngineConfig
from inflight.interface.messages import WorkerFailure
from inflight.interface.worker import Rendezvous


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message on the TCP connection of a rank. Node 0 refuses it if a field does not fit its own options."""

    token: str
    schema: str  # `codec.schema_digest()`, because two versions of Inflight may have different messages
    rank: int
    world_size: int
    nnodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The answer to a `Hello` that is accepted. Both sides close the link if it is silent for `max_silence_seconds`."""

    max_silence_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The answer to a `Hello` that is not accepted. Then node 0 closes the connection."""

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
    """The model is loaded. The worker accepts commands now."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUpFailed:
    """The worker's class could not be imported or constructed, or the model could not be loaded. The worker's process ends."""

    rank: int
    failure: WorkerFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """To a worker: end after the current command, and do not run waiting commands. Between executors: the sender submits no
    more commands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """The sender's engine has given its worker a command. Every other engine must give its worker the same command."""

    name: str  # "step 5", or the called method
    digest: str  # of the step's plan; "" for a call, because its arguments may differ between ranks


StartUpMessage = Hello | Welcome | Refused | StartUp | Ready | StartUpFailed | Stop | Submitted
