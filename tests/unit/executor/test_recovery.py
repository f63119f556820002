"""What one recovery does, with ranks that do what the test says."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from inflight.config.fault_tolerance import FaultToleranceConfig
from inflight.errors import EngineClosedError, InflightError, RankError, StepError, StepTimeoutError, WorkerDiedError
from inflight.executor import broken_links, recovery
from inflight.executor.meeting import Meeting
from inflight.executor.recovery import RecoveryResult, recover
from inflight.interface.messages import WorkerFailure
from inflight.interface.start_up import BeginEpoch, EpochCommand, Listening, StartUpFailed
from inflight.processes.child_process import PAUSES
from inflight.processes.recovery_limits import RecoveryLimits


class Clock:
    """A time that only tests and waits move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.sleeps: list[float] = []
        for module in (recovery, broken_links):
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


class TimedMeeting(Meeting):
    """Its waits take no real time."""

    def __init__(self, clock: Clock, epoch: int, num_ranks: int) -> None:
        super().__init__(epoch, num_ranks)
        self._clock = clock
        self.waited_for: tuple[set[int], float] | None = None

    def wait_for_reports(self, ranks: Collection[int], seconds: float) -> set[int]:
        self.waited_for = set(ranks), seconds
        silent = super().wait_for_reports(ranks, 0.0)
        self._clock.now += seconds if silent else 0.0
        return silent

    def wait_for_all_replies(self, seconds: float) -> None:
        super().wait_for_all_replies(0.0)


class Ranks:
    """What `recover` uses of an executor.

    Args:
        lost: epoch -> the ranks that are known to be lost when it begins.
        silent: epoch -> the ranks that do not report.
        failures: epoch -> why the ranks cannot join.
        links: epoch -> the pairs of ranks that cannot reach each other.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        lost: dict[int, set[int]] | None = None,
        silent: dict[int, set[int]] | None = None,
        failures: dict[int, Exception] | None = None,
        links: dict[int, tuple[tuple[int, int], ...]] | None = None,
        longest_budget: float = 0.0,
    ) -> None:
        self.can_recover, self.world_size, self.local_ranks = True, 4, range(4)
        self.limits = limits()
        self.starting: set[int] = set()
        self.longest_budget = longest_budget
        self.meetings: list[TimedMeeting] = []
        self.log: list[str] = []
        self.deadlines: list[float] = []
        self._clock, self._lost, self._silent = clock, lost or {}, silent or {}
        self._failures, self._links = failures or {}, links or {}

    @property
    def meeting(self) -> TimedMeeting:
        return self.meetings[-1]

    def begin_epoch(self, cause: RankError) -> set[int]:
        self.meetings.append(TimedMeeting(self._clock, len(self.meetings) + 1, self.world_size))
        return set(self._lost.get(self.meeting.epoch, ()))

    def send(self, rank: int, command: EpochCommand) -> None:
        assert command == BeginEpoch(epoch=self.meeting.epoch)
        self.log.append(f"begin {rank}")
        if rank not in self._silent.get(self.meeting.epoch, ()):
            address = ("", rank)
            self.meeting.take(Listening(rank=rank, epoch=self.meeting.epoch, address=address, num_dropped=0))

    def replace_rank(self, rank: int) -> None:
        self.log.append(f"replace {rank}")

    def join_epoch(self, deadline: float | None = None) -> None:
        assert deadline is not None
        self.deadlines.append(deadline)
        epoch = self.meeting.epoch
        for rank, peer in self._links.get(epoch, ()):
            failure = WorkerFailure(
                type_name="LostPeerError", message="", traceback="", is_echo=True, lost_ranks=(peer,)
            )
            self.meeting.take(StartUpFailed(rank=rank, failure=failure, epoch=epoch))
        for error in self.meeting.failed.values():
            raise error
        if epoch in self._failures:
            raise self._failures[epoch]


CAUSE = StepError("a step failed", rank=0)


def limits(**fields: Any) -> RecoveryLimits:
    return RecoveryLimits(FaultToleranceConfig(**fields))


def recovered(ranks: Ranks, counts: RecoveryLimits | None = None, cause: RankError = CAUSE) -> RecoveryResult:
    ranks.limits = counts or ranks.limits
    return recover(ranks, cause)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_ranks_that_all_report_are_kept(clock: Clock) -> None:
    ranks, counts = Ranks(clock), limits()
    assert recovered(ranks, counts) == RecoveryResult(epoch=1, replaced=())
    assert ranks.log == [f"begin {rank}" for rank in range(4)]
    assert not counts.times and not clock.sleeps


def test_lost_ranks_are_replaced_at_once_and_silent_ranks_after_the_time(clock: Clock) -> None:
    ranks, counts = Ranks(clock, lost={1: {2, 0}}, silent={1: {3}}), limits()
    result = recovered(ranks, counts)
    assert result == RecoveryResult(epoch=1, replaced=(0, 2, 3))
    assert not result.kept_arenas and RecoveryResult(epoch=1, replaced=()).kept_arenas
    assert ranks.log == ["begin 1", "begin 3", "replace 0", "replace 2", "replace 3"]
    assert ranks.meeting.waited_for == ({1, 3}, recovery.REPORT_SECONDS)
    assert len(counts.times) == 1


@pytest.mark.parametrize(
    ("budget", "cause", "seconds"),
    [
        (0.0, CAUSE, 1.0),
        (4.0, CAUSE, 1.0),
        (60.0, CAUSE, 12.0),
        (60.0, StepTimeoutError("too late", rank=0), 1.0),  # the ranks have had all their time
    ],
)
def test_a_rank_that_computes_has_a_share_of_the_time_of_its_step(
    clock: Clock, budget: float, cause: RankError, seconds: float
) -> None:
    ranks = Ranks(clock, longest_budget=budget)
    recovered(ranks, cause=cause)
    assert ranks.meeting.waited_for == ({0, 1, 2, 3}, seconds)


def test_a_rank_that_still_starts_is_not_replaced_again(clock: Clock) -> None:
    ranks = Ranks(clock, silent={1: {1, 2}})
    ranks.starting = {1}
    assert recovered(ranks).replaced == (2,)
    assert ranks.meeting.waited_for == ({0, 2, 3}, 1.0)


def test_a_loss_during_the_recovery_costs_one_more_epoch(clock: Clock) -> None:
    died = WorkerDiedError("rank 0 was lost", rank=0)
    ranks, counts = Ranks(clock, lost={1: {1}, 2: {0}}, failures={1: died}), limits()
    assert recovered(ranks, counts) == RecoveryResult(epoch=2, replaced=(0, 1))
    assert len(counts.times) == 1  # it is still the same recovery
    assert clock.sleeps == [PAUSES[0]]


def test_a_shortage_costs_its_duration(clock: Clock) -> None:
    """Each new rank is lost at once, as when there is no memory. The tries follow more and more slowly, and count once."""
    died = WorkerDiedError("rank 1 was lost", rank=1)
    epochs = range(1, 20)
    ranks = Ranks(clock, lost={epoch: {1} for epoch in range(1, 21)}, failures=dict.fromkeys(epochs, died))
    counts = limits(max_recoveries=1)
    assert recovered(ranks, counts) == RecoveryResult(epoch=20, replaced=(1,))
    assert clock.sleeps == [0.2, 0.5, 1.0, 2.0] + [5.0] * 15
    assert len(counts.times) == 1


def test_if_no_further_recovery_is_allowed_the_first_error_is_raised(clock: Clock) -> None:
    ranks, counts = Ranks(clock, lost={1: {1}}), limits(max_recoveries=2)
    for _ in range(2):
        counts.record()
    with pytest.raises(StepError) as caught:
        recovered(ranks, counts)
    assert caught.value is CAUSE
    assert not ranks.meetings


def test_ranks_that_cannot_meet_try_again_until_the_time_is_over(clock: Clock) -> None:
    """Each failed try without a new rank is followed by a short pause, and all tries share one deadline."""
    clock.now = 50.0
    late: dict[int, Exception] = {epoch: TimeoutError("not ready") for epoch in range(1, 100)}
    ranks, counts = Ranks(clock, failures=late), limits(engine_recovery_timeout_sec=1.0)
    with pytest.raises(StepError) as caught:
        recovered(ranks, counts)
    assert caught.value is CAUSE
    assert set(clock.sleeps[:-1]) == {PAUSES[0]} and 5 <= len(clock.sleeps) <= 6
    assert set(ranks.deadlines) == {51.0}
    assert not counts.times
    assert not [line for line in ranks.log if line.startswith("replace")]


def test_a_shutdown_ends_the_recovery(clock: Clock) -> None:
    closed = EngineClosedError("the executor was shut down")
    ranks = Ranks(clock, failures={1: closed})
    with pytest.raises(EngineClosedError):
        recovered(ranks)
    assert len(ranks.meetings) == 1


def test_any_error_of_a_rank_leads_to_another_try(clock: Clock) -> None:
    assert recovered(Ranks(clock, failures={1: InflightError("a rank has no memory")})).epoch == 2


def test_a_link_that_stays_broken_costs_a_rank(clock: Clock) -> None:
    """Also if the recovery goes on afterwards, the result names this rank."""
    ranks, counts = Ranks(clock, links=dict.fromkeys(range(1, 40), ((0, 3), (1, 3)))), limits()
    assert recovered(ranks, counts) == RecoveryResult(epoch=40, replaced=(3,), cut_off=(3,))
    assert [line for line in ranks.log if line.startswith("replace")] == ["replace 3"]
    assert len(counts.times) == 1
    assert clock.sleeps == [PAUSES[0]] * 39
