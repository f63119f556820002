"""`recover`: begins a new epoch after a fault. The engine core decides when, and calls it (engine/core/engine_core.py).

An epoch is a time in which all ranks live, are connected to each other, and run steps. When a rank dies, hangs or fails in a
step, the epoch is over, because a step needs all ranks. No token is lost, because the scheduler has the tokens of all requests.

    engine core   step fails -> voids the steps in flight -> recover() .......................... -> plans all requests in full
    executor                   BeginEpoch ->  <- Listening   JoinEpoch ->  <- Ready   initialize_from_config ->
    survivor      ... waits  | leaves its groups, drops its steps | meets the others         | warms up   | step
    lost rank     | dead, stopped or stuck ... | killed
    new process                                | starts (or was a spare) | meets, loads      | arena, ... | step

1. The number of the epoch rises. All pending commands fail. From now on replies of older epochs are dropped and counted.
2. Survivors get `BeginEpoch`. The thread that reads their commands handles it, even while the rank computes. They leave their
   groups, which ends all waits for other ranks, drop the commands of older epochs, and wait until their device is idle. Then
   they report where they listen. They keep their weights and their KV cache (its memory is called the arena).
3. A rank that is known to be dead or to hang is replaced at once. A rank that does not report in time is killed
   and replaced, too. A new process that still imports its libraries or loads its weights, because an earlier replacement was
   under way, is not killed: it reports afterwards.
4. When all ranks have reported, they get the addresses of all ranks, and make new groups and links. No rank is the
   master, so rank 0 may be lost, too. First each rank tries to reach the ranks that it must connect to. If it cannot reach
   some of them, it reports which, and the next epoch begins with 1. If the links stay broken, the fewest ranks are replaced
   (broken_links.py).
5. New ranks allocate the KV cache of the old configuration. They do not measure the free memory: the memory of the dead process
   may still count as used. Then all ranks run a step without requests, so a rank that cannot compute any more is found.
6. If a rank is lost meanwhile, the next epoch begins with 1, after a pause (`pause_seconds`). This ends when the time that is
   allowed for a recovery has passed.

The first plan of the new epoch has every request in full. If a rank is new, the prefix cache must be dropped, because the KV
cache of this rank is empty (`RecoveryResult.kept_arenas`).
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from inflight.errors import EngineClosedError, InflightError, RankError, StepTimeoutError
from inflight.executor.broken_links import BrokenLinks
from inflight.executor.meeting import Meeting
from inflight.interface.start_up import BeginEpoch, EpochCommand
from inflight.processes.child_process import pause_seconds
from inflight.processes.recovery_limits import RecoveryLimits

logger = logging.getLogger(__name__)

REPORT_SECONDS = 1.0  # how long an idle survivor may take to report
REPORT_SHARE = 0.2  # a survivor that computes may take this share of the time allowed for its step, if that is longer


@dataclass(frozen=True, kw_only=True)
class RecoveryResult:
    """
    Attributes:
        epoch: the number of the new epoch.
        replaced: the ranks that are new. They have loaded their weights again, and their KV caches are empty.
        cut_off: those of them that were replaced because of broken links.
    """

    epoch: int
    replaced: tuple[int, ...]
    cut_off: tuple[int, ...] = ()

    @property
    def kept_arenas(self) -> bool:
        """Whether all ranks kept their KV caches, so that the prefix cache is still right."""
        return not self.replaced


class Ranks(Protocol):
    """What a recovery uses of an `Executor`, which describes these attributes and methods."""

    starting: set[int]

    @property
    def can_recover(self) -> bool: ...

    @property
    def world_size(self) -> int: ...

    @property
    def local_ranks(self) -> Sequence[int]: ...

    @property
    def meeting(self) -> Meeting: ...

    @property
    def limits(self) -> RecoveryLimits: ...

    @property
    def longest_budget(self) -> float: ...

    def begin_epoch(self, cause: RankError) -> set[int]: ...

    def send(self, rank: int, command: EpochCommand) -> None: ...

    def replace_rank(self, rank: int) -> None: ...

    def join_epoch(self, deadline: float | None = None) -> None: ...


def recover(executor: Ranks, cause: RankError) -> RecoveryResult:
    """Begin a new epoch: replace lost ranks, and connect all ranks again. All pending commands fail. The caller must then send
    every request in full, and must drop the prefix cache unless `kept_arenas`. No other thread may call the executor meanwhile,
    except for `shutdown`. Waits until all ranks can run steps.

    Raises:
        RankError: `cause`, if the configuration does not allow a recovery, or if it did not succeed.
        EngineClosedError: `shutdown` was called meanwhile.
    """
    limits = executor.limits
    if not executor.can_recover or not limits.config.enabled:
        raise cause
    seconds = limits.config.engine_recovery_timeout_sec
    deadline = time.monotonic() + seconds
    replaced: set[int] = set()
    num_lost = 0  # how many tries in a row have started processes in vain
    links = BrokenLinks(executor.local_ranks)
    cut_off = set[int]()
    error: Exception = cause
    problem = limits.problem()
    while not problem:
        patience = REPORT_SECONDS
        if not isinstance(cause, StepTimeoutError):  # otherwise the ranks have had all the time allowed for the step
            patience = max(patience, REPORT_SHARE * executor.longest_budget)
        lost = executor.begin_epoch(cause) | cut_off
        new: set[int] = set()
        try:
            new = _gather(executor, lost, patience)
            if new and not replaced:
                limits.record()
            replaced |= new
            executor.join_epoch(deadline)
            return RecoveryResult(
                epoch=executor.meeting.epoch, replaced=tuple(sorted(replaced)), cut_off=tuple(sorted(links.replaced))
            )
        except EngineClosedError:
            raise
        except (TimeoutError, InflightError) as failure:
            error = failure
        if time.monotonic() >= deadline:
            problem = f"engine_recovery_timeout_sec={seconds:g} has passed"
            break
        reason = str(error).partition("\n")[0]
        logger.warning("the ranks could not begin epoch %d: %s", executor.meeting.epoch, reason)
        cut_off = links.ranks_to_replace(executor.meeting, has_new_ranks=bool(new))
        num_lost = num_lost + 1 if new else 0  # another try to meet costs little
        time.sleep(min(pause_seconds(max(num_lost, 1)), max(deadline - time.monotonic(), 0.0)))
    logger.error("the engine cannot recover: %s. The last error: %s", problem, error)
    raise cause


def _gather(executor: Ranks, lost: set[int], patience: float) -> set[int]:
    """Let all ranks begin the epoch. Replace those that are `lost`, or do not report within `patience` seconds. Returns the
    replaced ranks."""
    meeting = executor.meeting
    survivors = [rank for rank in range(executor.world_size) if rank not in lost]
    for rank in survivors:
        executor.send(rank, BeginEpoch(epoch=meeting.epoch))
    for rank in sorted(lost):
        executor.replace_rank(rank)
    # a rank that imports libraries or loads weights cannot report; it goes on, and takes part in this epoch afterwards
    silent = meeting.wait_for_reports(set(survivors) - executor.starting, patience)
    for rank in sorted(silent):
        problem = meeting.failed.get(rank, f"it has not ended its work within {patience:.3g} s")
        logger.warning("rank %d cannot take part in epoch %d: %s", rank, meeting.epoch, problem)
        executor.replace_rank(rank)
    return lost | silent
