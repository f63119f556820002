"""What the engine core reports to its front ends: `SchedulerStats` is for metrics and for the limits of the queue, and
`FaultStatus` says which faults and recoveries there were."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import zip_longest
from operator import add, sub
from typing import Literal, get_args

from inflight.interface.expert_counts import ExpertCounts
from inflight.interface.images import EncoderCounts


@dataclass(slots=True)
class StepCounts:
    """What the steps have done since the engine started, or in some time.

    Attributes:
        num_preemptions: how often a running request lost its blocks, and waited again.
        num_queried_tokens: tokens of admitted requests, which were looked up in the prefix cache or at a leader.
        num_hit_tokens: how many of these tokens were found.
        num_sampled_tokens: tokens that were drawn and added to requests.
        num_forced_tokens: tokens that were added without a draw, because a grammar allowed no other token.
        num_drafted_rows: how often a step has verified drafts of a request.
        num_draft_tokens: drafts that were verified.
        num_accepted_tokens: how many of these drafts were accepted.
        accepted_at: how often the first draft of a row was accepted, how often the second one, and so on.
    """

    num_preemptions: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_sampled_tokens: int = 0
    num_forced_tokens: int = 0
    num_drafted_rows: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_at: tuple[int, ...] = field(default=(), kw_only=True)

    def __add__(self, other: StepCounts) -> StepCounts:
        return self._combined(other, add)

    def __sub__(self, earlier: StepCounts) -> StepCounts:
        return self._combined(earlier, sub)

    def _combined(self, other: StepCounts, combine: Callable[[int, int], int]) -> StepCounts:
        (*mine, at), (*others, other_at) = astuple(self), astuple(other)
        positions = zip_longest(at, other_at, fillvalue=0)
        return replace(StepCounts(*map(combine, mine, others)), accepted_at=tuple(combine(*pair) for pair in positions))

    def record_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """A row had so many drafts, and so many of them were accepted."""
        self.num_drafted_rows += int(num_drafts > 0)
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        self.accepted_at = tuple(map(sum, zip_longest(self.accepted_at, (1,) * num_accepted, fillvalue=0)))

    @property
    def num_computed_prompt_tokens(self) -> int:
        return self.num_queried_tokens - self.num_hit_tokens


@dataclass(slots=True)
class TransferCounts:
    """What the transfers of KV blocks have done in some time.

    Attributes:
        num_queried_tokens: tokens of waiting requests that were not in the arena, and were looked for in the host pool and
            tiers.
        num_hit_tokens: how many of them were loaded into the arena.
        num_fetched_blocks: blocks of sequences that came from tiers to the host pool.
        num_skipped_saves: blocks that were not saved, because too much was being saved.
        num_failed: loads and saves that failed on a rank.
        num_late: requests that did not wait for the end of their transfer.
        load_bytes, save_bytes: bytes of loaded and saved blocks, all ranks together.
        load_seconds, save_seconds: from the call to the end of the copies, added up.
        tiers: tier -> what was counted -> number, added up over the ranks (`TierStack.take_counts`).
    """

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_loaded_blocks: int = 0
    num_fetched_blocks: int = 0
    num_saved_blocks: int = 0
    num_skipped_saves: int = 0
    num_failed: int = 0
    num_late: int = 0
    load_bytes: int = 0
    save_bytes: int = 0
    load_seconds: float = 0.0
    save_seconds: float = 0.0
    tiers: dict[str, dict[str, float]] = field(default_factory=dict)

    def __add__(self, later: TransferCounts) -> TransferCounts:
        (*mine, tiers), (*others, more) = astuple(self), astuple(later)
        total = TransferCounts(*map(add, mine, others))
        total.add_tiers([tiers, more])
        return total

    def add_tiers(self, counts_of_ranks: Iterable[dict[str, dict[str, float]]]) -> None:
        for counts in counts_of_ranks:
            for tier, numbers in counts.items():
                total = self.tiers.setdefault(tier, {})
                for name, number in numbers.items():
                    total[name] = total.get(name, 0) + number


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """The engine's state after a step, and counts since the last report.

    Attributes:
        step_id: the id of the newest committed step.
        num_running: completions in the batch now. A preempted one waits, and is not counted.
        num_waiting: requests that wait for their first step, for blocks or for a grammar.
        num_waiting_tokens: the tokens of waiting requests that are not computed yet. If the n sequences of a request share a
            prompt, the prompt's tokens count once.
        num_running_tokens: the tokens of running requests that are not computed yet. A request that decodes has one.
        kv_cache_usage: share of the KV blocks in use, in [0, 1].
        counts: what the steps since the last report have done.
        step_tokens: for each step since the last report, the tokens that it was planned to compute, drafts among them.
        step_gaps: for each step since the last report, the seconds that the devices were idle before it.
        step_time_ratios: measured time / predicted time of each step since the last report. Steps without a prediction are
            left out.
        engine: the number of the replica. The front end sets it.
        hidden_share: which share of the host's work was done while a device computed a step. None if there was no step since
            the last report.
        shares_cores: whether compute threads had to wait for their cores in the last steps.
        transfers: what the transfers of KV blocks have done since the last report. None if there are none.
        encoder: what the vision tower has done since the last report. None if the model has none.
        experts: how evenly the ranks of all replicas have computed experts since the last such report. None: not known now.
    """

    step_id: int
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    kv_cache_usage: float
    num_running_tokens: int = 0
    counts: StepCounts = field(default_factory=StepCounts)
    step_tokens: tuple[int, ...] = ()
    step_gaps: tuple[float, ...] = ()
    step_time_ratios: tuple[float, ...] = ()
    hidden_share: float | None = None
    shares_cores: bool = False
    transfers: TransferCounts | None = None
    encoder: EncoderCounts | None = None
    experts: ExpertCounts | None = None
    engine: int = 0


FaultCause = Literal["rank_died", "rank_hung", "link_broken", "step_failed", "engine_died", "front_end_died"]
FAULT_CAUSES: tuple[FaultCause, ...] = get_args(FaultCause)
FaultState = Literal["healthy", "recovering", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultStatus:
    """Whether the engine recovers from a fault at the moment, and the recoveries since its start.

    Attributes:
        state: "healthy": the engine makes steps. "recovering": new requests wait. "failed": the engine ends.
        epoch: the number of times that the ranks began anew, because one was lost or a step failed.
        num_recoveries: cause -> number of recoveries. A cause without recoveries may be left out.
        last_cause: why the last recovery was necessary, in one line. "" if there was none. It may name processes, files and
            requests, so it is for operators only.
        last_kind: the kind of this cause; "" if there was no recovery.
        last_recovery_seconds: the time from the notice of the last fault to the end of its recovery. 0.0 if there was none.
        num_stale_frames: late messages of earlier epochs that were dropped.
        num_resumed_requests: sequences that had begun (after the loss of an engine core: had emitted tokens), and went on.
        spare_workers: processes that wait to replace a rank.
    """

    state: FaultState = "healthy"
    epoch: int = 0
    num_recoveries: dict[str, int] = field(default_factory=dict)
    last_cause: str = ""
    last_kind: FaultCause | Literal[""] = ""
    last_recovery_seconds: float = 0.0
    num_stale_frames: int = 0
    num_resumed_requests: int = 0
    spare_workers: int = 0

    @staticmethod
    def of_replicas(statuses: Sequence[FaultStatus]) -> FaultStatus:
        """Returns the status of several replicas together. They recover if one of them recovers, and have failed if all
        have. The last cause is that of the last of `statuses` that has one. Every replica has counted each death of a front
        end, so these counts are not added."""
        whole = statuses[0]
        for status in statuses[1:]:
            whole = status.after(whole)
        states = [status.state for status in statuses]
        state: FaultState = "recovering" if "recovering" in states else "healthy" if "healthy" in states else "failed"
        counts = dict(whole.num_recoveries)
        if "front_end_died" in counts:
            counts["front_end_died"] = max(status.num_recoveries.get("front_end_died", 0) for status in statuses)
        return replace(
            whole, state=state, num_recoveries=counts, spare_workers=sum(status.spare_workers for status in statuses)
        )

    def with_dead_front_ends(self, count: int) -> FaultStatus:
        """Returns this status after so many deaths of front ends."""
        counts = {**self.num_recoveries, "front_end_died": count}
        cause = f"{count} front ends have died"
        return replace(self, num_recoveries=counts, last_cause=cause, last_kind="front_end_died")

    def after(self, past: FaultStatus) -> FaultStatus:
        """Returns this status with the counts of `past` added. `past` is the status of the processes before this one."""
        causes = {**past.num_recoveries, **self.num_recoveries}
        counts = {cause: past.num_recoveries.get(cause, 0) + self.num_recoveries.get(cause, 0) for cause in causes}
        return replace(
            self,
            epoch=past.epoch + self.epoch,
            num_recoveries=counts,
            last_cause=self.last_cause or past.last_cause,
            last_kind=self.last_kind or past.last_kind,
            last_recovery_seconds=self.last_recovery_seconds or past.last_recovery_seconds,
            num_stale_frames=past.num_stale_frames + self.num_stale_frames,
            num_resumed_requests=past.num_resumed_requests + self.num_resumed_requests,
        )
