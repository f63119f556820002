"""`ReplyTable`: holds the commands that not all ranks have answered, and matches each reply with its command.

A command is a step or a remote call. Each rank runs the command and replies. A reply has the epoch and the key of its command
(see interface/messages.py), so replies may come in any order. An epoch is the time from one fault to the next (recovery.py).
The table also keeps the errors of steps, in the order of their arrival, and owns one thread that watches deadlines.

Each command has a future for its result. A future is *settled* when it has its result or error. Futures are settled outside
the lock, so a future's callback may call methods of the table. Any thread may call any method.

These rules are applied to a reply, in this order, until one of them drops the reply or settles the future:

1. The reply is dropped if its epoch is not the table's epoch, if its key is not in the table because the command was never sent
   or all ranks have answered it, or if its rank has answered the command already.
2. The rank is removed from `missing`. If `missing` is empty then, the command is removed from the table.
3. The future does not change if it does not wait for this rank: it is settled already, or the caller asked only for the reply
   of another rank. A failure is logged. The failure of a step is also kept for `root_cause`.
4. A failure settles the future with an error at once, because ranks that wait for the failed rank may never reply. The failure
   of a step is also kept for `root_cause`.
5. If the future waits for no other rank, it is settled with the result. For a step this is the output of `output_rank`. For a
   call it is a list of all values, or the value of the one rank that the caller asked for.

If a rank dies, every future that waits for this rank gets an error. The table accepts no new commands until the rank is
replaced or an epoch begins. When an epoch begins, the commands of older epochs fail, and errors and deaths are forgotten.

Shortly before a deadline the table asks the ranks that the future waits for what they are doing (see `RankActivities`).
"""

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
# Ranks are asked what they are doing this long before a deadline. If a tenth of the time limit is shorter, it is used instead.
MAX_ASK_SECONDS = 0.5

Settlement = Callable[[], None]  # settles a future; must be called once, without the lock


class ReplyTable:
    """
    Args:
        step_budget: the most seconds that a step may take. A step may have a shorter limit of its own (`PendingStep.budget`).
            The time begins with the latest of three events: the step is added, all older steps are settled, and, if the step
            has a grammar, its masks (which tokens may be drawn) are sent.
        ask: asks a rank what it is doing. Must not wait: the answer, a `WorkerActivity`, is passed to `deliver` at once or
            later.
        state: returns what is known of a rank that does not answer such a question (see `RankActivities`).

    Attributes:
        epoch: the number of the present epoch.
        num_stale: how many replies of older epochs were dropped.
    """

    def __init__(self, *, step_budget: float, ask: Callable[[int], None], state: Callable[[int], str]) -> None:
        self.epoch = 0
        self.num_stale = 0
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
        """Add a command before it is sent. Returns whether it may be sent. If a rank is gone or the table is closed, sets an
        error in the command's future and returns False. The time limit of a call begins now."""
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
        """Call this before the masks of a step are sent. Returns False if they must not be sent, because a rank is gone or the
        table is closed."""
        with self._changed:
            pending = self._pending.get(("step", step_id))
            if isinstance(pending, PendingStep):
                pending.awaits_masks = False
                self._start_oldest()
            return not self._closed and not self._dead_ranks

    def replaced(self, rank: int) -> None:
        """Accept commands again, because a new process (or thread) has taken the place of this rank."""
        with self._changed:
            self._dead_ranks.pop(rank, None)

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
        if reply.epoch < self.epoch:
            self.num_stale += 1
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
            self._record_error(error)
        if not is_awaited:
            level = logging.DEBUG if failure.is_echo else logging.WARNING
            logger.log(level, "an error in a reply that nothing waits for: %s", error)
            return None
        self._mark_settled(pending)
        return partial(pending.future.set_exception, error)

    # -- ends ------------------------------------------------------------------------------------------------

    @property
    def longest_budget(self) -> float:
        """The most seconds that one of the steps in flight may take. 0.0 if no step is in flight."""
        with self._changed:
            budgets = [pending.budget for pending in self._pending.values() if isinstance(pending, PendingStep)]
        return min(max(budgets, default=0.0), self._step_budget)

    def begin_epoch(self, cause: RankError) -> set[int]:
        """Begin a new epoch. Pending commands fail because of `cause`. Returns the ranks that have died in the old epoch."""
        settlements: list[Settlement] = []
        with self._changed:
            self.epoch += 1
            dead = set(self._dead_ranks)
            for pending in self._pending.values():
                if not pending.settled:
                    pending.settled = True
                    error = pending.error(type(cause), f"{pending.name} was dropped, because {cause}", cause.rank)
                    settlements.append(partial(pending.future.set_exception, error))
            self._pending.clear()
            self._dead_ranks.clear()
            self._errors.clear()
            self._activities.forget()
        for settlement in settlements:
            settlement()
        return dead

    def rank_died(self, rank: int, reason: str, kind: type[RankError] = WorkerDiedError) -> None:
        """Set an error of class `kind` in the futures that wait for this rank. Refuse commands until the rank is replaced or an
        epoch begins."""
        settlements: list[Settlement] = []
        with self._changed:
            if self._closed or rank in self._dead_ranks:
                return
            self._dead_ranks[rank] = reason
            errors: list[RankError] = []
            for pending in self._pending.values():
                if rank in pending.awaited:
                    message = f"rank {rank} was lost ({reason}) before it answered {pending.name}"
                    errors.append(pending.error(kind, message, rank))
                    if not pending.settled:
                        self._mark_settled(pending)
                        settlements.append(partial(pending.future.set_exception, errors[-1]))
                pending.missing.discard(rank)
            self._pending = {key: pending for key, pending in self._pending.items() if pending.missing}
            self._record_error(errors[0] if errors else kind(f"rank {rank} was lost ({reason})", rank=rank))
            on_death = self._on_death
        logger.error("rank %d was lost: %s", rank, reason)
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
        """Returns the error that is the reason why the step of `error` failed.

        An echo is an error that a rank raises because another rank has failed. The reason is the first error that is not an
        echo. If no such error comes within `seconds`, the reason is that some ranks have not answered the step: returns a
        timeout error that names them. If all ranks have answered the step, returns `error`.
        """
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

    def _record_error(self, error: RankError) -> None:
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
        """Start the time limit of the oldest step that is not settled. Do nothing if the limit has started already, or if the
        step still waits for its masks."""
        steps = (step for step in self._pending.values() if isinstance(step, PendingStep) and not step.settled)
        oldest = next(steps, None)
        if oldest is not None and not oldest.awaits_masks and oldest.deadline == math.inf:
            self._set_deadline(oldest, min(oldest.budget, self._step_budget))

    def _set_deadline(self, pending: Pending, seconds: float) -> None:
        """Set a deadline. Wake the watching thread only if it would sleep past `ask_at`. Most steps do not need to wake it."""
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
        """Returns the ranks that must be asked now what they are doing. If this call comes late, moves the deadline by the
        delay, so that the ranks have time to answer."""
        asked: set[int] = set()
        for pending in self._pending.values():
            if pending.ask_at <= now:
                pending.deadline += now - pending.ask_at
                pending.ask_at = math.inf
                asked |= pending.awaited
        return sorted(asked)

    def _ask_all(self, ranks: Sequence[int]) -> None:
        """Ask the ranks what they are doing. The caller must not hold the lock: a rank in this process answers during the call,
        and `deliver` takes the lock."""
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
                    self._record_error(error)
                settlements.append(partial(pending.future.set_exception, error))
        return settlements
