"""`run_chaos`: damages a server at all moments of its life, one burst of faults after another, for a given time.

    start   processes are stopped, and front ends killed, while the server starts for the first time
    serve   bursts of one to three faults: any one or two processes are killed or stopped, often together with a shortage. The
            later faults of a burst meet the recovery from the first one. Then the server must recover, and work for a moment:
            faults without a pause would end an innocent request, as the cause of the faults (docs/fault-tolerance.md).
    rest    no faults: the server must have the processes, descriptors, threads, memory and files that it had before
    drain   SIGTERM under load, and one more fault. The server must end in time, and leave no process

The process that the user starts (`inflight serve`) is never hit: it is watched from outside. A shortage is a limit of
descriptors for it and the engine core, or a full temporary folder (a small tmpfs, if this user may mount one).
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.robustness.fault_injection import MAX_RECOVERY_SECONDS
from benchmarks.robustness.fault_load import Load
from benchmarks.robustness.fault_requests import LoadRequest
from benchmarks.robustness.fault_server import FaultServer, descendants

MAX_BURST = 3
MAX_GAP_SECONDS = 2.0  # from one fault of a burst to the next
WORK_SECONDS = 0.5, 3.0  # how long the server works between two bursts
SHORTAGE_SECONDS = 0.5, 3.0
SHORTAGES = ("descriptors", "disk", "", "")
REST_SECONDS = 60.0  # until spares are back
DRAIN_SECONDS = 10  # shutdown_timeout of the server
MAX_DRAIN_SECONDS = 60.0
TMPFS_MEGABYTES = 8
# So much may be added to a process until it is at rest: pools start threads when they need them.
FURTHER_DESCRIPTORS, FURTHER_THREADS = 4, 8
FURTHER_MEMORY = 1.5, 64 << 20  # a process may have 1.5 times the bytes that it had before, and 64 MiB more


@dataclass
class Chaos:
    """What happened.

    Attributes:
        counts: of each kind of fault, for example "SIGSTOP worker".
        problems: what the server did not survive as it should, apart from lost and wrong answers.
        may_break_connections: whether a front end was hit, or had no descriptor for new connections.
    """

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    may_break_connections: bool = False


class ChaosServer(FaultServer):
    """A server that is hit while it starts. `rng` draws the faults; the other arguments are those of `FaultServer`."""

    def __init__(
        self, rng: random.Random, chaos: Chaos, *arguments: Any, **options: Any
    ) -> None:  # Any: of `FaultServer`
        self._rng, self._chaos = rng, chaos
        self._starting = threading.Event()
        super().__init__(*arguments, **options)
        self._starting.set()

    def _begun(self) -> None:
        threading.Thread(target=self._hit_start, daemon=True).start()

    def _hit_start(self) -> None:
        while not self._starting.wait(self._rng.uniform(0.2, 4.0)) and sum(self._chaos.counts.values()) < MAX_BURST:
            self.hit(1, kills=False)

    def hit(self, count: int, *, kills: bool = True) -> None:
        """Kill or stop `count` processes. `kills=False`: kill only front ends. The death of an engine core or a rank at the
        first start is an error of the start, and whoever has started the server learns of it."""
        titles = sorted(self.titles().items(), key=lambda item: item[1])
        for pid, title in self._rng.sample(titles, min(count, len(titles))):
            kind = title.rstrip("0123456789 ") if title.startswith("front end") else title.split(" ")[0]
            may_kill = kills or kind == "front end"
            number = self._rng.choice([signal.SIGKILL, signal.SIGSTOP]) if may_kill else signal.SIGSTOP
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                self._chaos.counts[f"{number.name} {kind}"] += 1
                self._chaos.may_break_connections |= kind == "front end"

    @contextlib.contextmanager
    def shortage(self, kind: str, folder: Path) -> Iterator[None]:
        """Meanwhile no descriptors are free, or no room is left in `folder`."""
        if not kind:
            yield
            return
        self._chaos.counts[f"shortage of {kind}"] += 1
        filler = folder / "filler"
        if kind == "disk":
            with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
                for _ in range(TMPFS_MEGABYTES):
                    file.write(bytes(1 << 20))
        short = [self.pid, *(pid for pid, title in self.titles().items() if title.startswith("engine"))]
        usual = resource.getrlimit(resource.RLIMIT_NOFILE)
        if kind == "descriptors":
            self._chaos.may_break_connections = True
            for pid in short:
                _limit_descriptors(pid, (len(os.listdir(f"/proc/{pid}/fd")), usual[1]))
        try:
            yield
        finally:
            filler.unlink(missing_ok=True)
            for pid in descendants(self.pid):  # processes that were started meanwhile have inherited the limit
                _limit_descriptors(pid, usual)

    def usage(self) -> dict[str, tuple[int, int, int]]:
        """Title -> descriptors, threads and bytes of memory of each process."""
        memory = {pid: _resident_bytes(pid) for pid in descendants(self.pid)}
        names = {self.pid: "inflight serve", **self.titles()}
        return {
            title: (len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task")), memory[pid])
            for pid, title in names.items()
        }

    def drain(self, seconds: float) -> bool:
        """Send SIGTERM, hit one more process, and wait until the server has ended. Returns whether it and all processes that
        it had started have ended."""
        before = descendants(self.pid)
        self._process.terminate()
        time.sleep(self._rng.uniform(0.0, 1.0))
        self.hit(1)
        end = time.monotonic() + seconds
        while (not self.has_ended or any(_lives(pid) for pid in before)) and time.monotonic() < end:
            time.sleep(0.05)
        return self.has_ended and not any(_lives(pid) for pid in before)


@contextlib.contextmanager
def small_folder(folder: Path) -> Iterator[bool]:
    """Mount a small tmpfs there, if this user may. Yields whether it is one."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_MEGABYTES}m", "none", str(folder)]
    is_small = subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield is_small
    finally:
        if is_small:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def serve_bursts(
    server: ChaosServer, seconds: float, rng: random.Random, chaos: Chaos, folder: Path, kinds: Sequence[str]
) -> None:
    """Hit the server, which is under load, again and again."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not server.has_ended:
        time.sleep(rng.uniform(*WORK_SECONDS))
        with server.shortage(rng.choice(kinds), folder):
            for _ in range(rng.randint(1, MAX_BURST)):
                server.hit(rng.randint(1, 2))
                time.sleep(rng.uniform(0.0, MAX_GAP_SECONDS))
            time.sleep(rng.uniform(*SHORTAGE_SECONDS))
        if not server.wait_until_recovered(MAX_RECOVERY_SECONDS):
            chaos.problems.append("the server did not recover" if not server.has_ended else "the server has ended")
            return


def check_rest(server: ChaosServer, before: Mapping[str, tuple[int, int, int]], chaos: Chaos) -> None:
    """Wait until the server has its usual processes, and check that they use what they used before."""
    end = time.monotonic() + REST_SECONDS
    while (problems := _usage_problems(before, server.usage())) and time.monotonic() < end:
        time.sleep(0.5)
    chaos.problems += problems


def _usage_problems(before: Mapping[str, tuple[int, int, int]], after: Mapping[str, tuple[int, int, int]]) -> list[str]:
    if before.keys() != after.keys():
        return [f"the processes were {sorted(before)} and are {sorted(after)}"]
    factor, further = FURTHER_MEMORY
    return [
        f"{title}: (descriptors, threads, bytes) were {before[title]} and are {found}"
        for title, found in after.items()
        if found[0] > before[title][0] + FURTHER_DESCRIPTORS
        or found[1] > before[title][1] + FURTHER_THREADS
        or found[2] > before[title][2] * factor + further
    ]


def drain_under_load(server: ChaosServer, requests: Sequence[Sequence[LoadRequest]], chaos: Chaos) -> Load:
    """Returns the load. Its answers are right or missing: a draining server refuses new requests."""
    load = Load(server.address, requests)
    runner = threading.Thread(target=load.run, daemon=True)
    runner.start()
    time.sleep(0.5)
    if not server.drain(MAX_DRAIN_SECONDS):
        chaos.problems.append(f"the drain has not ended after {MAX_DRAIN_SECONDS:g} s, or has left a process")
    runner.join(MAX_DRAIN_SECONDS)
    return load


def _limit_descriptors(pid: int, limits: tuple[int, int]) -> None:
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "inflight" in Path(f"/proc/{pid}/cmdline").read_text()
    return False
