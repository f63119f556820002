"""`HeadLinks`: connects an engine core to front ends on another machine, the *head* (remote_replica.py has a drawing)."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

from inflight import envs
from inflight.config.engine import EngineConfig, ParallelConfig
from inflight.engine.process.control_socket import FrontEndLink
from inflight.engine.process.engine_process import EXIT_HEAD_LOST
from inflight.engine.process.outbox import EXIT_FAILED
from inflight.engine.process.remote_replica import NUMBER_BYTES, RemoteReplicas
from inflight.errors import ConfigError, EngineError
from inflight.interface.codec import schema_digest
from inflight.interface.start_up import ReplicaHello
from inflight.logs import exit_now
from inflight.processes.acceptor import RETRY_SECONDS, connect
from inflight.processes.streams import BlockingStream

logger = logging.getLogger(__name__)


class HeadLinks:
    """A thread keeps a spare connection to the head. When the head gives it to a front end, the thread calls `connect(link, 0)`
    and makes the next one. If the head cannot be reached for
    `engine_recovery_timeout_sec`, the process ends."""

    def __init__(self, config: EngineConfig, connect: Callable[[FrontEndLink, int], None]) -> None:
        self._config = config
        self._connect = connect
        self._lock = threading.Lock()  # for the next two
        self._linked: set[int] = set()  # the front ends that have a connection
        self._spare: socket.socket | None = None
        threading.Thread(target=self._run, name="inflight-head", daemon=True).start()

    def _leave(self, front_end: int) -> None:
        """The connection of this front end has ended. If the front end lives, the head gives it another one."""
        with self._lock:
            self._linked.discard(front_end)
            if self._spare is not None:
                with contextlib.suppress(OSError):  # it has just ended
                    self._spare.shutdown(socket.SHUT_RDWR)  # the next one is made with the new `_linked`

    def _run(self) -> None:
        try:
            while True:
                self._make_link()
        except (ConfigError, EngineError) as error:
            logger.critical("this process ends, because it has no connection to the head: %s", error)
            exit_now(EXIT_HEAD_LOST)
        except Exception:
            logger.critical("this process ends, because it cannot connect to the head", exc_info=True)
            exit_now(EXIT_FAILED)

    def _make_link(self) -> None:
        with self._lock:
            linked = frozenset(self._linked)
        spare = join_head(self._config.parallel, linked, self._config.fault_tolerance.engine_recovery_timeout_sec)
        with self._lock:
            self._spare = spare if linked == self._linked else None  # otherwise `_leave` was called meanwhile
        received = b""
        if self._spare is not None:
            with contextlib.suppress(OSError):
                received = spare.recv(NUMBER_BYTES, socket.MSG_WAITALL)
        with self._lock:
            self._spare = None
            number = int.from_bytes(received)
            is_link = linked == self._linked and len(received) == NUMBER_BYTES
            self._linked |= {number} if is_link else set()
        if is_link:
            self._connect(FrontEndLink(number, BlockingStream(spare), partial(self._leave, number)), 0)
        else:
            spare.close()


def join_head(
    parallel: ParallelConfig, linked: frozenset[int], max_seconds: float, *, is_trial: bool = False
) -> socket.socket:
    """Returns a connection to the head, for a front end that is not one of `linked`. Tries again and again for `max_seconds`,
    also after a refusal: until the head has noticed that a link is broken, it refuses another one. In a trial, the head only
    says whether the replica may join, and a refusal is final.

    Raises:
        ConfigError: the head refuses the replica.
        EngineError: the head did not answer.
    """
    assert parallel.head is not None
    token = envs.cluster_token()
    hello = ReplicaHello(
        schema=schema_digest(),
        rank=parallel.replicas[parallel.replica_index],
        linked=tuple(linked),
        terms=parallel.terms,
        process=parallel.headless,
        is_trial=is_trial,
    )
    end = time.monotonic() + max_seconds
    while True:
        try:
            left = round(max(end - time.monotonic(), 0.0), 1)
            joined = connect(parallel.head, hello, token, max_seconds=left, place=RemoteReplicas.place)
            joined.settimeout(None)
            return joined
        except (ConfigError, EngineError) as error:
            is_final = isinstance(error, ConfigError) and is_trial
            if is_final or time.monotonic() + RETRY_SECONDS > end:
                raise
            logger.warning("%s; the next try is in %g s", error, RETRY_SECONDS)
        time.sleep(RETRY_SECONDS)
