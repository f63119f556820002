"""The messages between an executor and a worker process when the process starts or ends, and when an epoch begins.

An epoch is a period in which the ranks are connected to each other. After a fault the ranks connect again, which begins a new
epoch (executor/recovery.py).

worker of another node  -- Hello -->  executor  -- Welcome | Refused -->       over TCP only, before the other messages
executor                -- Preload -->  spare process                          the process only imports its libraries
executor                -- StartUp | BeginEpoch -->  worker  -- Listening -->
executor                -- JoinEpoch -->  worker  -- Ready | StartUpFailed -->
executor                -- Stop -->  worker

A new process gets `StartUp`. In a later epoch a process that already is a worker gets `BeginEpoch`. All other messages are the
same for both.

With Ray, the executor has a process that talks to Ray (executor/ray_placement.py):

executor  -- PlaceRanks, StartRank -->  this process  -- RanksPlaced | Refused, StartUpFailed -->  executor

A replica on another machine than the front ends, on TCP connections to their machine:

replica  -- ReplicaHello -->  head  -- Welcome | Refused -->  replica

If an external launcher (torchrun) has started the ranks, each rank has an executor of its own. These executors send each other:

executor  -- Ready | StartUpFailed; Submitted and replies, in the order of the commands; Stop -->  every other executor
"""

from __future__ import annotations

from dataclasses import dataclass

from inflight.config.engine import EngineConfig
from inflight.config.ranks import Place
from inflight.interface.messages import WorkerFailure
from inflight.interface.worker import Rendezvous


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message on the TCP connection of a rank, after both sides have proved that they know the token (handshake.py).
    Node 0 refuses it if a field does not fit its own options."""

    schema: str  # `codec.schema_digest()`, because two versions of Inflight may have different messages
    rank: int
    world_size: int
    nnodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaHello(Hello):
    """The first message on each TCP connection of a replica that is on another machine than the front ends (`--headless`).
    `rank` is the number of the replica.

    Attributes:
        linked: the numbers of the front ends that have a connection to the replica. This connection is for another one. When a
            front end takes it, the head sends its number (4 bytes). Then front end and engine core talk.
        terms: what must be the same on both machines, as name -> value.
        process: a random name of the `--headless` process. No other one may have the same replica while this one is connected.
        is_trial: the head only says whether the replica may join, and closes the connection.
    """

    world_size: int = 1
    nnodes: int = 1
    linked: tuple[int, ...]
    terms: dict[str, str]
    process: str
    is_trial: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The answer to a `Hello` that is accepted. Both sides close the link if it is silent for `max_silence_seconds`."""

    max_silence_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The answer to a `Hello` that is not accepted. Then node 0 closes the connection. It is also the answer to `PlaceRanks` if
    there is no room for the ranks, or no Ray."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Preload:
    """Import the module of `worker_class` ("module:class"), and wait for `StartUp`."""

    worker_class: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUp:
    """Be this rank, from this epoch on.

    Attributes:
        title: the name that `ps` shows, see `worker_title`.
        worker_class: "module:class" of the worker.
        host: the address at which the rank listens for other ranks. If it is "", the rank listens at the local address of its
            connection to the executor.
    """

    config: EngineConfig
    place: Place
    title: str
    worker_class: str
    epoch: int
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginEpoch:
    """End everything that belongs to older epochs. If a command waits for another rank, the thread that reads this message
    aborts the wait."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """The rank has no work of older epochs any more, and listens for the other ranks.

    Attributes:
        address: host and port. `("", 0)` if the rank is a thread of the executor's process.
        num_dropped: how many commands of older epochs the rank has not run.
    """

    rank: int
    epoch: int
    address: tuple[str, int]
    num_dropped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinEpoch:
    """Meet the other ranks. If the rank has no worker yet, construct it and load the model."""

    epoch: int
    rendezvous: Rendezvous | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The rank has met the others, and its model is loaded. It accepts commands of this epoch now."""

    rank: int
    epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUpFailed:
    """The worker's class could not be imported or constructed, the model could not be loaded, or the rank could not meet the
    others. If the rank has no worker, it ends, unless it could not meet the others."""

    rank: int
    failure: WorkerFailure
    epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """To a worker: end after the current command, and do not run waiting commands. Between executors: the sender submits no
    more commands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """The sender's engine has given its worker a command. Every other engine must give its worker the same command."""

    name: str  # "step 5", or the called method
    digest: str  # of the step's plan; "" for a call, because its arguments may differ between ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceRanks:
    """Let Ray reserve `num_cpus` and `num_gpus` for each rank.

    Attributes:
        cluster: the address of Ray's head; "" for the cluster of this machine.
        group: the id of Ray's placement group into which the ranks are put, in hexadecimal; "" for a new group.
        max_seconds: how long to wait until there is room for all ranks.
    """

    num_ranks: int
    num_cpus: int
    num_gpus: int
    cluster: str
    group: str
    max_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksPlaced:
    """There is room for all ranks. Sent again when a rank gets another machine.

    Attributes:
        machines: for each rank, Ray's name of its machine.
        machine: Ray's name of the engine's machine.
        host: the address of the engine's machine.
    """

    machines: tuple[str, ...]
    machine: str
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRank:
    """End the process of this rank if there is one, and start a new one. It connects to the engine with `token`, at
    `host`:`port` or, on the engine's machine, at the Unix socket `local_name`. If this fails, `StartUpFailed` is sent."""

    rank: int
    world_size: int
    title: str
    local_name: str
    host: str
    port: int
    token: str


EpochCommand = BeginEpoch | JoinEpoch
EpochReply = Listening | Ready | StartUpFailed
PlacementMessage = PlaceRanks | RanksPlaced | StartRank
RankMessage = Hello | Welcome | Refused | Preload | StartUp | EpochCommand | EpochReply | Stop | Submitted
StartUpMessage = RankMessage | PlacementMessage | ReplicaHello
