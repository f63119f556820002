"""The process that talks to Ray for a `RayExecutor`: `inflight.executor.ray_placement TITLE STREAM_FD`.

Ray chooses the machines and starts an actor for each rank there. The actor starts the rank's process:

    executor ══ this process ── Ray ──▶ actor ── starts ──▶ rank
       ╚════════════════════════ TCP ════════════════════════╝

When Ray's head has been gone for a minute, Ray ends every process that uses Ray. The executor and the ranks must go on, so they
do not use Ray: only this process and the actors do. A rank's process ends when its stream to the executor ends, not when its
actor ends. While the actor lives, Ray reserves the rank's CPUs or GPU. All arguments of an actor's methods are numbers and
text, because Ray pickles them.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from inflight.errors import ConfigError
from inflight.executor.failures import failure_of
from inflight.interface.codec import schema_digest
from inflight.interface.start_up import (
    Hello,
    PlacementMessage,
    PlaceRanks,
    RanksPlaced,
    Refused,
    StartRank,
    StartUpFailed,
)
from inflight.processes.acceptor import connect
from inflight.processes.child_process import SIGKILL_SECONDS, child_command, child_environment, name_process
from inflight.processes.streams import BlockingStream

logger = logging.getLogger(__name__)

MAX_CONNECT_SECONDS = 20.0
RETRY_SECONDS = 0.2
Send = Callable[[PlacementMessage | Refused | StartUpFailed], None]


class RankStarter:
    """The actor of a rank: starts and ends the rank's process on its machine."""

    def __init__(self) -> None:
        self._pidfd: int | None = None  # of the rank's process

    def machine(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def start(self, rank: int, world_size: int, title: str, host: str, port: int, token: str) -> None:
        """End the rank's process if there is one, and start a new one.

        Raises:
            ConfigError, EngineError: the engine does not accept the connection.
        """
        self._end()
        hello = Hello(schema=schema_digest(), rank=rank, world_size=world_size, nnodes=1)
        with connect((host, port) if port else host, hello, token, max_seconds=MAX_CONNECT_SECONDS) as connected:
            program = ["inflight.executor.worker_main", title, str(connected.fileno())]
            started = subprocess.run(
                [sys.executable, *child_command(0, program)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                pass_fds=[connected.fileno()],
                env=child_environment(os.environ, sys.path),
                check=True,
            )
        self._pidfd = os.pidfd_open(int(started.stdout))

    def _end(self) -> None:
        if self._pidfd is not None:
            if not wait([self._pidfd], 0):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
                wait([self._pidfd], SIGKILL_SECONDS)
            os.close(self._pidfd)
            self._pidfd = None


class RayPlacement:
    """The ranks' actors. Ray ends them when this process ends.

    Raises:
        ConfigError: no Ray can be reached, or there is no room for the ranks.
    """

    def __init__(self, wanted: PlaceRanks, send: Send) -> None:
        self._send = send
        self._started: dict[int, StartRank] = {}  # the newest command for each rank
        self._locks: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        address = wanted.cluster or os.environ.get("RAY_ADDRESS") or "auto"
        if address == "local" or "://" in address:
            # Ray would start a cluster that ends with this process, or use a proxy
            raise ConfigError(
                f"RAY_ADDRESS={address!r} names no running cluster; give host:port of its head, or leave it out"
            )
        try:
            ray.init(address=address, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"Ray cannot be reached: {error}; start it with `ray start --head`, or set RAY_ADDRESS to the address of its "
                "head"
            ) from error
        resources = {"CPU": wanted.num_cpus} if wanted.num_gpus == 0 else {"GPU": wanted.num_gpus}
        bundles = [resources] * wanted.num_ranks
        if wanted.group:
            group = PlacementGroup(ray.PlacementGroupID.from_hex(wanted.group))
        else:
            group = ray.util.placement_group(bundles, strategy="PACK")
        self._options: dict[str, Any] = {  # Any: what Ray declares
            "num_cpus": wanted.num_cpus if wanted.num_gpus == 0 else 0,
            "num_gpus": wanted.num_gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group),
        }
        try:
            actors = [self._new_actor() for _ in bundles]
            machines = ray.get([actor.machine.remote() for actor in actors], timeout=wanted.max_seconds)
        except GetTimeoutError:
            raise ConfigError(
                f"Ray has no room for {wanted.num_ranks} ranks with {_text(resources)} each within "
                f"{wanted.max_seconds:g} s; its machines have {_text(ray.cluster_resources())}, of which "
                f"{_text(ray.available_resources())} are free; add machines, or lower the parallel sizes"
            ) from None
        except (RayError, ValueError) as error:  # for example, Inflight is not installed on a machine
            raise ConfigError(f"Ray cannot start the ranks: {error}") from error
        self._own = str(ray.get_runtime_context().get_node_id())
        # ranks of one machine have consecutive numbers, and the first ones are on the engine's machine if there is room
        found = sorted(zip(machines, actors, strict=True), key=lambda each: (each[0] != self._own, each[0]))
        self._machines = [machine for machine, _ in found]
        self._actors = [actor for _, actor in found]
        self._tell()

    def start(self, command: StartRank) -> None:
        self._started[command.rank] = command
        threading.Thread(target=self._start, args=(command,), daemon=True).start()

    def _start(self, command: StartRank) -> None:
        """Runs in a thread of its own. If the machine of the rank's actor is gone, only this thread waits."""
        rank = command.rank
        with self._locks[rank]:
            while self._started[rank] is command:
                try:
                    self._start_with_actor(command, self._actors[rank])
                    return
                # The actor is dead, so Ray has its place for a new one. But Ray may not know yet that its machine is gone, too.
                except RayActorError as error:
                    logger.warning("the actor of rank %d has ended, so it is started again: %s", rank, error)
                    self._actors[rank] = self._new_actor()
                    time.sleep(RETRY_SECONDS)
                except RayError as error:
                    cause = error.cause if isinstance(error, RayTaskError) else error
                    if self._started[rank] is command:
                        self._send(StartUpFailed(rank=rank, failure=failure_of(cause)))
                    return

    def _start_with_actor(self, command: StartRank, actor: Any) -> None:  # Any: see `_new_actor`
        machine = ray.get(actor.machine.remote())
        if machine != self._machines[command.rank]:
            self._machines[command.rank] = machine
            self._tell()
        address = (command.local_name, 0) if machine == self._own else (command.host, command.port)
        ray.get(actor.start.remote(command.rank, command.world_size, command.title, *address, command.token))

    def _new_actor(self) -> Any:  # Any: an actor's handle has the methods of its class
        return ray.remote(RankStarter).options(**self._options).remote()

    def _tell(self) -> None:
        host = ray.util.get_node_ip_address()
        self._send(RanksPlaced(machines=tuple(self._machines), machine=self._own, host=host))


def surroundings() -> tuple[str, str]:
    """Returns the address of Ray's head and the placement group of the caller, as in `PlaceRanks`."""
    if not ray.is_initialized():
        return "", ""
    group = ray.util.get_current_placement_group()
    return ray.get_runtime_context().gcs_address, "" if group is None else group.id.hex()


def _text(resources: Mapping[str, float]) -> str:
    numbers = {name: f"{resources.get(name, 0):g}" for name in ("CPU", "GPU") if name in resources}
    return " and ".join(f"{number} {name}s" for name, number in numbers.items()) or "0 CPUs"


def main() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):  # the executor's process handles Ctrl-C and the end of the terminal
        signal.signal(number, signal.SIG_IGN)
    name_process(sys.argv[1])
    os.dup2(2, 1)  # to stderr, because Ray prints what actors print, and the engine's stdout is for results
    stream = BlockingStream(socket.socket(fileno=int(sys.argv[2])))
    placement: RayPlacement | None = None
    while (message := stream.receive()) is not None:
        if isinstance(message, PlaceRanks):
            try:
                placement = RayPlacement(message, stream.send)
            except ConfigError as error:
                stream.send(Refused(reason=str(error)))
        else:
            assert isinstance(message, StartRank) and placement is not None, message
            placement.start(message)


if __name__ == "__main__":
    # an actor's class must have a module that Ray can import
    from inflight.executor.ray_placement import main as main_of_module

    main_of_module()
