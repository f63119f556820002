"""`ReplyTable`: holds the commands that not all ranks have answered. A reply finds its command by epoch and key, in any order.

It owns every pending step and call, the errors of steps in the order of their arrival, and one thread that watches deadlines.
Any thread may call any method. A future is *settled* when it has its result or error. Futures are settled outside the lock, so
a future's callback may call methods of the table.

These rules are applied to a reply, in this order, until one of them drops the reply or settles the future:

1. The reply is dropped if its epoch is not the table's (an epoch is one start of the ranks), if its key is not in the table
   because the command was never sent or all ranks have answered it, or if its rank has answered it already.
2. The rank is removed from `missing`. If `missing` is empty then, the command is removed from the table.
3. The future may not wait for this rank any more, because an error, a timeout, or the one reply that the caller asked for has
   settled it. Then it does not change. A failure is logged. The failure of a step is kept for `root_cause`.
4. A failure settles the future with an error at once, because the ranks that wait for the failed rank may never reply.
5. If the future waits for no other rank, it is settled with the result. For a step this is the output of `output_rank`. For a
   call it is a list of all values, or the value of the one rank that the caller asked for.

If a rank dies, the future of every command that waits for it gets an error, and the table accepts no new commands.

Shortly before a deadline the table asks each rank that has not answered what it is doing: see `RankActivities`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from inflight.errors import EngineClosedError, EngineError, RankError, WorkerDiedError
from inflight.executor.pending import Pending, PendingCall, PendingStep
from inflight.executor.rank_activities import RankActivities
from inflight.interface.messages import ReplyKey, RpcReply, StepReply, WorkerActivity, WorkerFailure, WorkerReply

logger = logging.getLogger(__name__)

MAX_ERRORS = 64  # only the first errors are kept, because the cause is among them
MAX_ASK_SECONDS = 0.5  # this long before a deadline the ranks are asked, or a tenth of the time allowed if shorter

Settlement = Callable[[], None]  # settles a future; must be called once, without the lock


class ReplyTable:
    """
    Args:
        step_budget: how many seconds a step may take. This time begins with the latest of three events: the step is submitted,
            the step before it ends, its masks are sent.
        ask: asks a rank what it is doing. The rank's `WorkerActivity` is delivered at once or later. Must not wait.
        state: see `RankActivities`.
    """

    def __init__(self, *, step_budget: float, ask: Callable[[int], None], state: Callable[[int], str]) -> None:
        self.epoch = 0
        self._step_budget = step_budget
        self._ask = ask
        self._pending: dict[ReplyKey, Pending] = {}  # commands that not all ranks have answered, oldest first
        self._last_step_id = -1
        self._dead_ranks: dict[int, str] = {}  # rank -> reason
        self._activities = RankActivities(state)
        self._errors: list[RankError] = []  # the errors of steps, and of ranks that died
        self._closed = False
        self._on_death: Callable[[], None] | None = None
        self._changed = threading.Condition(threading.Lock())
        self._watcher_wakes_at = math.inf
        self._watcher = threading.Thread(target=self._watch_deadlines, name="inflight-deadlines", daemon=True)
        self._watcher.start()

    # -- commands out ----------------------------------------------------------------------------------------

    def add(self, pending: PendingStep | PendingCall) -> bool:
        """Add a command and return True: it may be sent. If a rank is gone or the table is closed, set an error in its future
        and return False. The time allowed for a call begins now."""
        with self._changed:
            refusal = self._refusal(pending.name, pending.step_id, pending.request_ids)
            if refusal is None:
                if isinstance(pending, PendingStep):
                    step_id = pending.plan.step_id
                    assert step_id > self._last_step_id, (
                        f"step {step_id} was submitted after step {self._last_step_id}: step ids must increase"
                    )
                    self._last_step_id = step_id
                assert pending.key not in self._pending
                self._pending[pending.key] = pending
                if isinstance(pending, PendingStep):
                    self._start_oldest()
                elif pending.timeout is not None:
                    self._set_deadline(pending, pending.timeout)
                return True
        pending.future.set_exception(refusal)
        return False

    def masks_sent(self, step_id: int) -> bool:
        """Call this before the masks of a step are sent. If it returns False, they must not be sent, because a rank is gone or
        the table is closed."""
        with self._changed:
            pending = self._pending.get(("step", step_id))
            if isinstance(pending, PendingStep):
                pending.awaits_masks = False
                self._start_oldest()
            return not self._closed and not self._dead_ranks

    def raise_if_unusable(self, what: str) -> None:
        """
        Raises:
            EngineClosedError: the table is closed, so `what` cannot be done.
            WorkerDiedError: a rank is gone, so `what` cannot be done.
        """
        with self._changed:
            refusal = self._refusal(what)
        if refusal is not None:
            raise refusal

    def _refusal(self, what: str, step_id: int | None = None, request_ids: Sequence[str] = ()) -> EngineError | None:
        if self._closed:
            return EngineClosedError(f"{what} cannot run: the executor was shut down before")
        for rank, reason in self._dead_ranks.items():
            message = f"{what} cannot run: rank {rank} is gone ({reason})"
            return WorkerDiedError(message, rank=rank, step_id=step_id, request_ids=request_ids)
        return None

    # -- replies in ------------------------------------------------------------------------------------------

    def deliver(self, reply: WorkerReply) -> None:
        with self._changed:
            if isinstance(reply, WorkerActivity):
                self._activities.answers[reply.rank] = reply
                return
            settlement = self._take(reply)
        if settlement is not None:
            settlement()

    def _take(self, reply: StepReply | RpcReply) -> Settlement | None:
        pending = self._pending.get(reply.key) if reply.epoch == self.epoch else None
        if pending is None or reply.rank not in pending.missing:
            logger.debug("dropped the reply of rank %d to %s %d of epoch %d", reply.rank, *reply.key, reply.epoch)
            return None
        is_awaited = reply.rank in pending.awaited and not pending.settled
        pending.missing.remove(reply.rank)
        if not pending.missing:
            del self._pending[reply.key]
        if isinstance(reply, StepReply):
            self._activities.newest_replies[reply.rank] = reply.step_id
        if reply.failure is not None:
            return self._take_failure(pending, reply.rank, reply.failure, is_awaited)
        pending.values[reply.rank] = reply.output if isinstance(reply, StepReply) else reply.value
        if pending.settled or pending.awaited:
            return None
        self._mark_settled(pending)
        return partial(pending.future.set_result, pending.result())

    def _take_failure(self, pending: Pending, rank: int, failure: WorkerFailure, is_awaited: bool) -> Settlement | None:
        error = pending.failure_error(rank, failure)
        if isinstance(error, RankError) and isinstance(pending, PendingStep):
            self._note_error(error)
        if not is_awaited:
            level = logging.DEBUG if failure.is_echo else logging.WARNING
            logger.log(level, "an error came after its command had ended: %s", error)
            return None
        self._mark_settled(pending)
        return partial(pending.future.set_exception, error)

    # -- ends ------------------------------------------------------------------------------------------------

    def rank_died(self, rank: int, reason: str) -> None:
        """Set an error in the futures that wait for this rank, and refuse all later commands."""
        settlements: list[Settlement] = []
        with self._changed:
            if self._closed or rank in self._dead_ranks:
                return
            self._dead_ranks[rank] = reason
            errors: list[RankError] = []
            for pending in self._pending.values():
                if rank in pending.awaited:
                    message = f"rank {rank} died ({reason}) before it answered {pending.name}"
                    errors.append(pending.error(WorkerDiedError, message, rank))
                    if not pending.settled:
                        self._mark_settled(pending)
                        settlements.append(partial(pending.future.set_exception, errors[-1]))
                pending.missing.discard(rank)
            self._pending = {key: pending for key, pending in self._pending.items() if pending.missing}
            self._note_error(errors[0] if errors else WorkerDiedError(f"rank {rank} died ({reason})", rank=rank))
            on_death = self._on_death
        logger.error("rank %d died: %s", rank, reason)
        for settlement in settlements:
            settlement()
        if on_death is not None:
            on_death()

    def set_death_callback(self, on_death: Callable[[], None]) -> None:
        """After each death, the thread that reports it calls `on_death`. If a rank died before, `on_death` is called now."""
        with self._changed:
            self._on_death = on_death
            has_news = bool(self._dead_ranks)
        if has_news:
            on_death()

    def root_cause(self, error: RankError, seconds: float) -> RankError:
        """Returns why the step of `error` failed: the first error that is not an echo (one that another rank caused). If no
        such error comes within `seconds`, returns a timeout error for the ranks that have not answered the step. If all ranks
        have answered it, returns `error`."""
        with self._changed:
            pending = None if error.step_id is None else self._pending.get(("step", error.step_id))
            asked = sorted(pending.missing) if pending is not None and self._first_cause() is None else []
        self._ask_all(asked)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._first_cause() is not None, seconds)
            if (cause := self._first_cause()) is not None:
                return cause
            if pending is None or not pending.missing:
                return error
            return self._activities.silence_behind(error, pending)

    def _first_cause(self) -> RankError | None:
        return next((error for error in self._errors if not error.is_echo), None)

    def _note_error(self, error: RankError) -> None:
        if len(self._errors) < MAX_ERRORS:
            self._errors.append(error)
            self._changed.notify_all()

    def close(self) -> None:
        """Set `EngineClosedError` in all pending futures and end the watching thread. Idempotent."""
        settlements: list[Settlement] = []
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for pending in self._pending.values():
                if not pending.settled:
                    pending.settled = True
                    error = EngineClosedError(f"the executor was shut down before {pending.name} ended")
                    settlements.append(partial(pending.future.set_exception, error))
            self._pending.clear()
            self._changed.notify_all()
        for settlement in settlements:
            settlement()
        if threading.current_thread() is not self._watcher:  # a future's callback may call `close` in this thread
            self._watcher.join()

    # -- deadlines -------------------------------------------------------------------------------------------

    def _mark_settled(self, pending: Pending) -> None:
        """Mark a command as settled, and start the time limit of the next step. The caller settles the future later,
        without the lock."""
        pending.settled = True
        pending.deadline = pending.ask_at = math.inf
        self._start_oldest()

    def _start_oldest(self) -> None:
        """Start the time limit of the oldest step, unless it has started or the step still waits for its masks."""
        steps = (step for step in self._pending.values() if isinstance(step, PendingStep) and not step.settled)
        oldest = next(steps, None)
        if oldest is not None and not oldest.awaits_masks and oldest.deadline == math.inf:
            self._set_deadline(oldest, self._step_budget)

    def _set_deadline(self, pending: Pending, seconds: float) -> None:
        """Set a deadline. The watching thread is woken only if it would sleep too long, so most steps switch no thread."""
        pending.deadline = time.monotonic() + seconds
        pending.ask_at = pending.deadline - min(MAX_ASK_SECONDS, seconds / 10)
        if pending.ask_at < self._watcher_wakes_at:
            self._changed.notify_all()

    def _watch_deadlines(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                now = time.monotonic()
                settlements = self._expire(now)
                asked = self._due_questions(now)
                if not settlements and not asked:
                    times = (min(pending.ask_at, pending.deadline) for pending in self._pending.values())
                    self._watcher_wakes_at = min(times, default=math.inf)
                    self._changed.wait(min(max(self._watcher_wakes_at - now, 0.0), threading.TIMEOUT_MAX))
            for settlement in settlements:
                settlement()
            self._ask_all(asked)

    def _due_questions(self, now: float) -> list[int]:
        """Returns the ranks that must be asked now. If this comes late, moves the deadline, so that they can answer."""
        asked: set[int] = set()
        for pending in self._pending.values():
            if pending.ask_at <= now:
                pending.deadline += now - pending.ask_at
                pending.ask_at = math.inf
                asked |= pending.awaited
        return sorted(asked)

    def _ask_all(self, ranks: Sequence[int]) -> None:
        """Ask the ranks. The caller must not hold the lock, because a rank in this process answers during the call."""
        with self._changed:
            for rank in ranks:
                self._activities.answers.pop(rank, None)
        for rank in ranks:
            self._ask(rank)

    def _expire(self, now: float) -> list[Settlement]:
        settlements: list[Settlement] = []
        for pending in self._pending.values():
            if pending.deadline <= now and pending.ask_at == math.inf:
                error = self._activities.timeout_error(pending, self._step_budget)
                self._mark_settled(pending)
                if isinstance(pending, PendingStep):
                    self._note_error(error)
                settlements.append(partial(pending.future.set_exception, error))
        return settlements
