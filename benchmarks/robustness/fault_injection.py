"""`Injector`: damages a running server, one fault after another, and notes when the server logged it."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.robustness.fault_server import POLL_SECONDS, FaultServer
from benchmarks.robustness.faulty_worker import ORDERS, give_order

FAULTS = ("sigkill", "sigstop", *ORDERS, "two-ranks", "during-recovery")
# name of a target -> how the titles of its processes begin
TARGETS = {"rank": "worker tp", "engine": "engine", "front-end": "front end", "spare": "worker spare"}
MAX_NOTICE_SECONDS = 60.0
MAX_RECOVERY_SECONDS = 120.0
MAX_TARGET_SECONDS = 20.0
MAX_SECOND_FAULT_DELAY = 0.3


@dataclass(frozen=True)
class Fault:
    """What is done, and to which kind of process. Of these faults only "sigkill" and "sigstop" have a target except "rank"."""

    kind: str
    target: str = "rank"

    def __post_init__(self) -> None:
        if self.target != "rank" and self.kind not in ("sigkill", "sigstop"):
            raise SystemExit(f"the fault {self.kind} hits ranks, not {self.target}; use sigkill or sigstop")

    @property
    def name(self) -> str:
        return f"{self.kind} {self.target}"


@dataclass
class Injected:
    """One fault that has happened.

    Attributes:
        processes: the processes that it hit.
        noticed_seconds: from the fault to the first line of the server's log; None if the server logged nothing.
        recovered_seconds: from the fault until the server was ready and healthy again; None if it never was.
    """

    fault: Fault
    processes: list[str]
    noticed_seconds: float | None = None
    recovered_seconds: float | None = None


class CannotInject(Exception):
    """The server has no process of the wanted kind."""


class Injector:
    """
    Args:
        orders: the folder named in the server's environment by `ORDERS_VARIABLE`.
        rng: draws the processes and the moments within a recovery.
    """

    def __init__(self, server: FaultServer, orders: Path, rng: random.Random) -> None:
        self._server = server
        self._orders = orders
        self._rng = rng

    def inject(self, fault: Fault) -> Injected:
        """Damage the server, and wait until it has recovered.

        Raises:
            CannotInject: see there.
        """
        # the loss of a spare process is repaired, but it is no recovery
        num_before = -1 if fault.target == "spare" else sum(self._server.num_recoveries().values())
        start = time.monotonic()
        injected = Injected(fault, self._damage(fault))
        noticed = self._wait_for_notice(start)
        if noticed is not None:
            injected.noticed_seconds = noticed - start
        if self._server.wait_until_recovered(MAX_RECOVERY_SECONDS, num_before):
            injected.recovered_seconds = time.monotonic() - start
        return injected

    def _damage(self, fault: Fault) -> list[str]:
        match fault.kind:
            case "sigkill" | "sigstop":
                number = signal.SIGKILL if fault.kind == "sigkill" else signal.SIGSTOP
                return self._signal(number, self._draw(fault.target, 1))
            case "two-ranks":
                return self._signal(signal.SIGKILL, self._draw("rank", 2))
            case "during-recovery":
                return self._kill_during_recovery()
            case order:
                ranks = sorted(title for title in self._server.titles().values() if title.startswith(TARGETS["rank"]))
                if not ranks:
                    raise CannotInject("no rank is a process of its own")
                rank = self._rng.randrange(len(ranks))
                give_order(self._orders, rank, order)
                return [f"rank {rank}"]

    def _kill_during_recovery(self) -> list[str]:
        """Kill a rank and, when the server has noticed it, another one."""
        start = time.monotonic()
        first = self._draw("rank", 1)
        names = self._signal(signal.SIGKILL, first)
        self._wait_for_notice(start)
        time.sleep(self._rng.uniform(0.0, MAX_SECOND_FAULT_DELAY))
        return names + self._signal(signal.SIGKILL, self._draw("rank", 1))

    def _wait_for_notice(self, start: float) -> float | None:
        """Wait for the first line of the log after `start`. Returns its time, or None if there is none."""
        end = start + MAX_NOTICE_SECONDS
        while (noticed := self._server.log_time_after(start)) is None and time.monotonic() < end:
            if self._server.has_ended:
                return None
            time.sleep(POLL_SECONDS)
        return noticed

    def _draw(self, target: str, count: int) -> dict[int, str]:
        """Returns process id -> title of `count` processes."""
        titles = sorted(
            (pid, title) for pid, title in self._server.titles().items() if title.startswith(TARGETS[target])
        )
        if len(titles) < count:
            raise CannotInject(
                f"the server has {len(titles)} processes of the kind {target!r}, and the fault needs {count}"
            )
        return dict(self._rng.sample(titles, count))

    def _titles(self, target: str) -> list[tuple[int, str]]:
        return sorted((pid, title) for pid, title in self._server.titles().items() if title.startswith(TARGETS[target]))

    def _signal(self, number: signal.Signals, processes: dict[int, str]) -> list[str]:
        for pid in processes:
            os.kill(pid, number)
        return list(processes.values())
