"""`ReplyTable`: the commands that not all ranks have answered yet, found by their epoch and key and never by position.

Owns every pending step and call, the errors of steps in the order of their arrival, and one thread that watches the deadlines.
Any thread may call any method. Futures are settled outside the lock, so a future's callback may call back.

These rules apply to a reply, in this order, until one of them drops it or settles the future:

1. It is dropped if its epoch is not the table's, if its key is not in the table (never sent, or complete), or if its rank has
   replied before.
2. Its rank leaves `missing`. If no rank is missing any more, the command leaves the table.
3. If the future does not wait for this rank any more (it was settled by an error, by a timeout, or by the one reply that the
   caller asked for), the future does not change. A failure is logged; the failure of a step is kept for `root_cause`.
4. A failure settles the future with an error at once: the ranks that wait for the failed one may never reply.
5. If the future waits for no other rank, it is settled with the result: for a step the output of `output_rank`, for a call a
   list of all values, or the value of the one rank that the caller asked for.

If a rank dies, the future of every command that waits for it fails, and the table accepts no new commands.

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

MAX_ERRORS = 64  # so many errors are kept; the first cause is one of them
MAX_ASK_SECONDS = 0.5  # how long before a deadline the ranks are asked; at most a tenth of the time allowed

Settlement = Callable[[], None]  # sets a future; to be called without the lock, once


class ReplyTable:
    """
    Args:
        step_budget: seconds a step may take. Its time begins with its submission, with the end of the step before it, or when
            its masks are sent, whichever is last.
        ask: asks a rank what it is doing; its `WorkerActivity` is delivered at once or later. Must not wait.
        state: see `RankActivities`.
    """

    def __init__(self, *, step_budget: float, ask: Callable[[int], None], state: Callable[[int], str]) -> None:
        self.epoch = 0
        self._step_budget = step_budget
        self._ask = ask
        self._pending: dict[ReplyKey, Pending] = {}  # not complete, in the order in which they were sent
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
        """Returns whether the command may be sent. If a rank is gone or the table is closed, it may not, and its future has
        failed. The time of a call begins now."""
        with self._changed:
            refusal = self._refusal(pending.name, pending.step_id, pending.request_ids)
            if refusal is None:
                if isinstance(pending, PendingStep):
                    step_id = pending.plan.step_id
                    assert step_id > self._last_step_id, (
                        f"step {step_id} after step {self._last_step_id}: ids must rise"
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
        """To be called before the masks of a step are sent. Returns False if they must not be sent, because a rank is gone or
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
            EngineClosedError, WorkerDiedError: `what` cannot be done any more.
        """
        with self._changed:
            refusal = self._refusal(what)
        if refusal is not None:
            raise refusal

    def _refusal(self, what: str, step_id: int | None = None, request_ids: Sequence[str] = ()) -> EngineError | None:
        if self._closed:
            return EngineClosedError(f"{what} came after the executor was shut down")
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
            logger.debug("dropped: the answer of rank %d to %s %d of epoch %d", reply.rank, *reply.key, reply.epoch)
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
            logger.log(logging.DEBUG if failure.is_echo else logging.WARNING, "nobody waits for this: %s", error)
            return None
        self._mark_settled(pending)
        return partial(pending.future.set_exception, error)

    # -- ends ------------------------------------------------------------------------------------------------

    def rank_died(self, rank: int, reason: str) -> None:
        """Fail the futures that wait for this rank, and refuse every later command."""
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
        """`on_death` is called after each death, in the thread that brings the news; at once if a rank has died before."""
        with self._changed:
            self._on_death = on_death
            has_news = bool(self._dead_ranks)
        if has_news:
            on_death()

    def root_cause(self, error: RankError, seconds: float) -> RankError:
        """Why the step of `error` failed: the first error of any rank that is not an echo. If no such error comes within
        `seconds`, returns a timeout of the ranks that have not answered the step. If all have answered, returns `error`."""
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
        """Fail everything pending with `EngineClosedError` and end the watcher. Idempotent."""
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
        if threading.current_thread() is not self._watcher:  # a future's callback may shut the executor down
            self._watcher.join()

    # -- deadlines -------------------------------------------------------------------------------------------

    def _mark_settled(self, pending: Pending) -> None:
        """The time of the next step begins. The caller sets the future after it has released the lock."""
        pending.settled = True
        pending.deadline = pending.ask_at = math.inf
        self._start_oldest()

    def _start_oldest(self) -> None:
        """The time of the oldest step begins, unless it has begun already, or the step still waits for the engine's masks."""
        steps = (step for step in self._pending.values() if isinstance(step, PendingStep) and not step.settled)
        oldest = next(steps, None)
        if oldest is not None and not oldest.awaits_masks and oldest.deadline == math.inf:
            self._set_deadline(oldest, self._step_budget)

    def _set_deadline(self, pending: Pending, seconds: float) -> None:
        """Wakes the watcher only if it would sleep past this deadline, so that a step costs no thread switch."""
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
        """The ranks that must be asked now. If the watcher comes late, the deadline moves, so that they have time to answer."""
        asked: set[int] = set()
        for pending in self._pending.values():
            if pending.ask_at <= now:
                pending.deadline += now - pending.ask_at
                pending.ask_at = math.inf
                asked |= pending.awaited
        return sorted(asked)

    def _ask_all(self, ranks: Sequence[int]) -> None:
        """The caller must not hold the lock: a rank in this process answers during the call."""
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
