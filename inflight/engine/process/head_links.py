"""`HeadLinks`: connects an engine core to front ends on another machine, the *head* (remote_replica.py has a drawing)."""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

from inflight import envs
from inflight.config.engine import EngineConfig, ParallelConfig
from inflight.engine.process.control_socket import FrontEndLink
from inflight.engine.process.engine_process import EXIT_HEAD_LOST
from inflight.engine.process.remote_replica import NUMBER_BYTES, RemoteReplicas
from inflight.errors import ConfigError, EngineError
from inflight.executor.join import RETRY_SECONDS, connect
from inflight.interface.codec import schema_digest
from inflight.interface.start_up import ReplicaHello
from inflight.processes.streams import BlockingStream

logger = logging.getLogger(__name__)


class HeadLinks:
    """A thread always has a spare connection to the head. When a front end has taken it, it calls `connect` with the link
    and 0. If the head does not answer for as long as a recovery may take, the process ends."""

    def __init__(self, config: EngineConfig, connect: Callable[[FrontEndLink, int], None]) -> None:
        self._config, self._connect = config, connect
        self._linked: set[int] = set()  # the front ends that have a connection
        self._spare: socket.socket | None = None
        threading.Thread(target=self._run, name="inflight-head", daemon=True).start()

    def _leave(self, front_end: int) -> None:
        """The connection of this front end has ended. If the front end lives, the head gives it another one."""
        self._linked.discard(front_end)
        if (spare := self._spare) is not None:
            with contextlib.suppress(OSError):  # it has just ended
                spare.shutdown(socket.SHUT_RDWR)  # the next one is made with the new `_linked`

    def _run(self) -> None:
        seconds = self._config.fault_tolerance.engine_recovery_timeout_sec
        while True:
            linked = frozenset(self._linked)
            try:
                self._spare = spare = join_head(self._config.parallel, linked, seconds)
            except (ConfigError, EngineError) as error:
                logger.critical("this process ends, because the head is lost: %s", error)
                os._exit(EXIT_HEAD_LOST)
            received = b""
            with contextlib.suppress(OSError):
                if linked == self._linked:  # otherwise `_leave` was called meanwhile
                    received = spare.recv(NUMBER_BYTES)
            self._spare = None
            if not received:
                spare.close()
                continue
            number = int.from_bytes(received)
            self._linked.add(number)
            self._connect(FrontEndLink(number, BlockingStream(spare), partial(self._leave, number)), 0)


def join_head(
    parallel: ParallelConfig, linked: frozenset[int], max_seconds: float, *, may_be_refused: bool = True
) -> socket.socket:
    """Returns a connection to the head, for a front end that is not one of `linked`. Tries again and again for `max_seconds`,
    but not after a refusal if it may not be refused. Until the head has noticed that a link is broken, it refuses another one.

    Raises:
        ConfigError: the head refuses the replica.
        EngineError: the head did not answer.
    """
    assert parallel.head is not None
    hello = ReplicaHello(
        token=envs.cluster_token(),
        schema=schema_digest(),
        rank=parallel.replicas[parallel.replica_index],
        linked=tuple(linked),
        terms=parallel.terms,
    )
    end = time.monotonic() + max_seconds
    while True:
        try:
            left = round(max(end - time.monotonic(), 0.0), 1)
            joined = connect(parallel.head, hello, max_seconds=left, place=RemoteReplicas.place)
            joined.settimeout(None)
            return joined
        except (ConfigError, EngineError) as error:
            is_final = isinstance(error, ConfigError) and not may_be_refused
            if is_final or time.monotonic() + RETRY_SECONDS > end:
                raise
            logger.warning("%s; the next try is in %g s", error, RETRY_SECONDS)
        time.sleep(RETRY_SECONDS)
