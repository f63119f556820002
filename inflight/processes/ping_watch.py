"""`PingWatch`: finds processes that live, but do nothing any more, because a signal has stopped them, or because they hang.

One `PingWatch` in the executor watches the ranks. Another one, in `EngineProcess`, watches the engine core as its only "rank",
with the number 0. Every PING_SECONDS each gets a ping. The thread of the process that reads messages answers; it never
computes. A process that does not answer may only be slow: other processes have its cores. So silence alone is no proof. A rank
or an engine core is lost in these cases:

    its process is stopped by a signal                           at the third look in a row (`ChildProcess.stays_stopped`)
    no thread of its process runs, waits for a core or a disk,   at the FROZEN_TICKS-th look without an answer at the
    at each of the last FROZEN_TICKS - ANSWER_TICKS looks        earliest; so the answering thread waits for a lock that no
                                                                 thread releases
    it is on another machine                                     after REMOTE_TICKS pings; the link may be cut

A rank that computes for ever keeps its cores busy and answers pings; the time allowed for a step ends it. Nothing ends such an
engine core.

Time is counted in pings, and not in seconds. So if this process itself was stopped, it does not take the ranks for silent.
"""

from collections import Counter
from collections.abc import Callable

from inflight.processes.child_process import STOPPED_LOOK_SECONDS, ChildProcess

PING_SECONDS = STOPPED_LOOK_SECONDS
ANSWER_TICKS = 4  # a process whose threads all sleep is no reason for doubt before it has missed so many pings
FROZEN_TICKS = 20
REMOTE_TICKS = 40


class PingWatch:
    """Used in one thread only: the I/O thread of the executor, or the event loop of `EngineProcess`.

    Args:
        ask: sends a ping to a rank.
        hangs: called with a rank that is lost, and the reason.
    """

    def __init__(self, ask: Callable[[int], None], hangs: Callable[[int, str], None]) -> None:
        self._ask = ask
        self._hangs = hangs
        self._num_silent: Counter[int] = Counter()  # rank -> pings since its last message
        self._num_frozen: Counter[int] = Counter()  # rank -> at how many looks in a row none of its threads could run

    def heard(self, rank: int) -> None:
        """Note that a message of the rank has come, or that a new process takes its place."""
        self._num_silent[rank] = self._num_frozen[rank] = 0

    def tick(self, rank: int, process: ChildProcess | None) -> None:
        """Look at the rank, then ping it. Call this every PING_SECONDS. `process` is None if the rank is on another machine."""
        reason = self._silence(rank, process)
        if reason:
            self._hangs(rank, f"it has not answered for {self._num_silent[rank] * PING_SECONDS:g} s; {reason}")
            return
        self._num_silent[rank] += 1
        self._ask(rank)

    def _silence(self, rank: int, process: ChildProcess | None) -> str:
        """Returns why the rank is lost, or "" if it is not."""
        num_silent = self._num_silent[rank]
        if process is None:
            if num_silent >= REMOTE_TICKS:
                return "the link to its machine may be cut"
            return ""
        if process.stays_stopped():
            return process.state
        if num_silent < ANSWER_TICKS:
            return ""
        self._num_frozen[rank] = 0 if process.may_run else self._num_frozen[rank] + 1
        is_frozen = self._num_frozen[rank] >= FROZEN_TICKS - ANSWER_TICKS
        return f"no thread of process {process.pid} can run" if is_frozen else ""
