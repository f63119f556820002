"""`ReplyTable`: which messages the ranks have not answered yet, found by (epoch, id) and never by position.

Owns every pending step and call, the incomplete reports of the KV connectors, the errors of steps in the order of their
arrival, and one thread that watches the deadlines. Any thread may call any method. Futures are settled outside the
lock, so a future's callback may call back.

A reply goes through these steps, and ends at the first that does not let it pass:

1. of another epoch, of an id that is not here (complete, or never sent), or of a rank that has replied: dropped;
2. it takes its rank out of `missing`; the last one takes the message out of the table;
3. a failure settles the future at once, with an error: the ranks that wait for the failed one may never reply;
4. of a step, when all ranks have replied, the KV connectors' reports are taken in, also if its future has failed before:
   they are true whatever became of the tokens, and come out with the next step that succeeds;
5. the future is settled with the result, unless it was settled before (then the reply is late, and its result dropped).

A `WorkerEvent` answers nothing: its report is taken in as in 4, and `on_event` is called so that an idle engine looks.

Shortly before a deadline the table asks each rank that has not answered what it is doing. On the rank a thread that does
nothing else answers. So a rank that does not answer this question is stopped, hangs while it holds the GIL, or is cut off, and
the error of the timeout names it. If all ranks answer, the error names a rank that is not waiting for another one.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from inflight.errors import EngineClosedError, EngineError, RankError, StepTimeoutError, WorkerDiedError
from inflight.executor.aggregation import KVConnectorAggregator, merge_outputs
from inflight.executor.pending import Pending, PendingCall, PendingStep
from inflight.interface.messages import RpcReply, StepReply, WorkerActivity, WorkerEvent, WorkerFailure, WorkerReply
from inflight.interface.step import KVConnectorOutput

logger = logging.getLogger(__name__)

MAX_ERRORS = 64  # that are kept; the first cause is among them
MAX_ASK_SECONDS = 0.5  # between this question and the deadline; at most a tenth of the time

Settlement = Callable[[], None]  # sets a future; to be called without the lock, once


class ReplyTable:
    """
    Args:
        num_ranks: the world size.
        output_rank: the rank whose tokens count.
        step_budget: seconds a step may take, from its submission, the end of the step before it, or when its masks are sent.
        ask: asks a rank what it is doing; its `WorkerActivity` is delivered at once or later. Must not wait.
        state: what is known of a rank that does not answer this question; "" if nothing is. Must not wait.
    """

    def __init__(
        self,
        *,
        num_ranks: int,
        output_rank: int,
        step_budget: float,
        ask: Callable[[int], None],
        state: Callable[[int], str],
    ) -> None:
        self.epoch = 0
        self.num_ranks = num_ranks
        self._output_rank = output_rank
        self._step_budget = step_budget
        self._ask, self._state = ask, state
        self._aggregator = KVConnectorAggregator(num_ranks)
        self._steps: dict[int, PendingStep] = {}  # not complete, by step id
        self._calls: dict[int, PendingCall] = {}  # not complete, by call id
        self._unsettled_steps: dict[int, PendingStep] = {}  # in order; only the first has a deadline
        self._last_step_id = -1
        self._dead_ranks: dict[int, str] = {}  # rank -> reason
        self._activities: dict[int, WorkerActivity] = {}  # rank -> its answer to the last question
        self._newest_replies: dict[int, int] = {}  # rank -> the last step that it answered
        self._errors: list[RankError] = []  # of steps, and of ranks that died
        self._closed = False
        self._on_event: Settlement | None = None
        self._changed = threading.Condition(threading.Lock())
        self._watcher_wakes_at = math.inf
        self._watcher = threading.Thread(target=self._watch_deadlines, name="inflight-deadlines", daemon=True)
        self._watcher.start()

    # -- messages out ----------------------------------------------------------------------------------------

    def add_step(self, pending: PendingStep) -> bool:
        """Whether it may be sent. If not, its future has failed: a rank is gone, or the table is closed."""
        with self._changed:
            refusal = self._refusal(pending)
            if refusal is None:
                step_id = pending.step_id
                assert step_id > self._last_step_id, f"step {step_id} after step {self._last_step_id}: ids must rise"
                self._last_step_id = step_id
                self._steps[step_id] = pending
                self._unsettled_steps[step_id] = pending
                self._start_oldest()
                return True
        pending.fail(refusal)
        return False

    def masks_sent(self, step_id: int) -> bool:
        """The masks of a step are about to be sent. Whether they may be: not to a table that is closed, or has lost a rank."""
        with self._changed:
            pending = self._steps.get(step_id)
            if pending is not None:
                pending.awaits_masks = False
                self._start_oldest()
            return not self._closed and not self._dead_ranks

    def add_call(self, call_id: int, pending: PendingCall) -> bool:
        """As `add_step`. The call's timeout counts from now."""
        with self._changed:
            refusal = self._refusal(pending)
            if refusal is None:
                assert call_id not in self._calls
                self._calls[call_id] = pending
                if pending.timeout is not None:
                    self._set_deadline(pending, pending.timeout)
                return True
        pending.fail(refusal)
        return False

    def _refusal(self, pending: Pending) -> EngineError | None:
        if self._closed:
            return EngineClosedError(f"{pending.name} came after the executor was shut down")
        for rank, reason in self._dead_ranks.items():
            return pending.error(WorkerDiedError, f"{pending.name} cannot run: rank {rank} is gone ({reason})", rank)
        return None

    # -- replies in ------------------------------------------------------------------------------------------

    def deliver(self, reply: WorkerReply) -> None:
        with self._changed:
            match reply:
                case StepReply():
                    settlement = self._take_step_reply(reply)
                case RpcReply():
                    settlement = self._take_call_reply(reply)
                case WorkerEvent():
                    settlement = self._take_event(reply)
                case WorkerActivity():
                    self._activities[reply.rank] = reply
                    settlement = None
        if settlement is not None:
            settlement()

    def set_event_callback(self, on_event: Callable[[], None]) -> None:
        """`on_event` is called after each `WorkerEvent` and death, in the thread that brings it; at once if one came before."""
        with self._changed:
            self._on_event = on_event
            has_news = self._aggregator.has_reports or bool(self._dead_ranks)
        if has_news:
            on_event()

    def take_kv_connector_output(self) -> KVConnectorOutput:
        """What all ranks have reported and no step has brought out yet; each report comes once, here or with a step."""
        with self._changed:
            return self._aggregator.take()

    def _take_event(self, event: WorkerEvent) -> Settlement | None:
        if event.epoch != self.epoch or self._closed:
            logger.debug("dropped: an event of rank %d, epoch %d", event.rank, event.epoch)
            return None
        self._aggregator.add(event.rank, event.kv_connector_output)
        return self._on_event

    def _take_step_reply(self, reply: StepReply) -> Settlement | None:
        pending = self._steps.get(reply.step_id) if reply.epoch == self.epoch else None
        if pending is None or reply.rank not in pending.missing:
            logger.debug("dropped: rank %d, step %d, epoch %d", reply.rank, reply.step_id, reply.epoch)
            return None
        pending.missing.remove(reply.rank)
        self._newest_replies[reply.rank] = reply.step_id
        if not pending.missing:
            del self._steps[reply.step_id]
        if isinstance(reply.result, WorkerFailure):
            settlement = self._take_failure(pending, reply.rank, reply.result)
        else:
            pending.outputs[reply.rank] = reply.result
            settlement = None
        if pending.missing:
            return settlement
        if pending.settled:
            for rank, output in pending.outputs.items():
                self._aggregator.add(rank, output.kv_connector_output)
            return settlement
        self._mark_settled(pending)
        return partial(pending.resolve, merge_outputs(pending.outputs, self._output_rank, self._aggregator))

    def _take_call_reply(self, reply: RpcReply) -> Settlement | None:
        pending = self._calls.get(reply.call_id) if reply.epoch == self.epoch else None
        if pending is None or reply.rank not in pending.missing:
            logger.debug("dropped: rank %d, call %d, epoch %d", reply.rank, reply.call_id, reply.epoch)
            return None
        was_awaited = reply.rank in pending.awaited
        pending.missing.remove(reply.rank)
        if not pending.missing:
            del self._calls[reply.call_id]
        if reply.failure is not None:
            if not was_awaited:
                logger.warning("%s", pending.failure_error(reply.rank, reply.failure))
                return None
            return self._take_failure(pending, reply.rank, reply.failure)
        pending.values[reply.rank] = reply.value
        if pending.settled or pending.awaited:
            return None
        self._mark_settled(pending)
        return partial(pending.resolve, pending.result())

    def _take_failure(self, pending: Pending, rank: int, failure: WorkerFailure) -> Settlement | None:
        error = pending.failure_error(rank, failure)
        if isinstance(error, RankError) and isinstance(pending, PendingStep):
            self._note_error(error)
        if pending.settled:
            logger.log(logging.DEBUG if failure.is_echo else logging.WARNING, "after its future was settled: %s", error)
            return None
        self._mark_settled(pending)
        return partial(pending.fail, error)

    # -- ends ------------------------------------------------------------------------------------------------

    def rank_died(self, rank: int, reason: str) -> None:
        """Fail what waits for this rank, and everything from now on."""
        settlements: list[Settlement] = []
        with self._changed:
            if self._closed or rank in self._dead_ranks:
                return
            self._dead_ranks[rank] = reason
            errors: list[RankError] = []
            for pending in self._all_pending():
                if rank in pending.awaited:
                    message = f"rank {rank} died ({reason}) before it answered {pending.name}"
                    errors.append(pending.error(WorkerDiedError, message, rank))
                    if not pending.settled:
                        self._mark_settled(pending)
                        settlements.append(partial(pending.fail, errors[-1]))
                pending.missing.discard(rank)
            self._forget_complete()
            self._note_error(errors[0] if errors else WorkerDiedError(f"rank {rank} died ({reason})", rank=rank))
            on_event = self._on_event
        logger.error("rank %d died: %s", rank, reason)
        for settlement in settlements:
            settlement()
        if on_event is not None:
            on_event()

    def _forget_complete(self) -> None:
        self._steps = {step_id: pending for step_id, pending in self._steps.items() if pending.missing}
        self._calls = {call_id: pending for call_id, pending in self._calls.items() if pending.missing}

    def root_cause(self, error: RankError, seconds: float) -> RankError:
        """Why the step of `error` failed: the first error of any rank that is not an echo. If no such error comes within this
        many seconds, it is a timeout of the ranks that have not answered the step; if all have answered, it is `error`."""
        with self._changed:
            pending = self._steps.get(-1 if error.step_id is None else error.step_id)
            asked = sorted(pending.missing) if pending is not None and self._first_cause() is None else []
        self._ask_all(asked)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._first_cause() is not None, seconds)
            if (cause := self._first_cause()) is not None:
                return cause
            if pending is None or not pending.missing:
                return error
            ranks, silent = self._describe_silent(pending)
            message = f"{pending.name} had no reply from {silent}, for which rank {error.rank} waited: {error}"
            return pending.error(StepTimeoutError, message, ranks[0])

    def _first_cause(self) -> RankError | None:
        return next((error for error in self._errors if not error.is_echo), None)

    def _note_error(self, error: RankError) -> None:
        if len(self._errors) < MAX_ERRORS:
            self._errors.append(error)
            self._changed.notify_all()

    def raise_if_unusable(self, what: str) -> None:
        """
        Raises:
            EngineClosedError, WorkerDiedError: `what` cannot be done any more.
        """
        with self._changed:
            if self._closed:
                raise EngineClosedError(f"{what} came after the executor was shut down")
            for rank, reason in self._dead_ranks.items():
                raise WorkerDiedError(f"{what}: rank {rank} is gone ({reason})", rank=rank)

    def close(self) -> None:
        """Fail everything pending with `EngineClosedError` and end the watcher. Idempotent."""
        settlements: list[Settlement] = []
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for pending in self._all_pending():
                if not pending.settled:
                    pending.settled = True
                    error = EngineClosedError(f"the executor was shut down before {pending.name} ended")
                    settlements.append(partial(pending.fail, error))
            self._steps.clear()
            self._calls.clear()
            self._unsettled_steps.clear()
            self._changed.notify_all()
        for settlement in settlements:
            settlement()
        if threading.current_thread() is not self._watcher:  # a future's callback may shut the executor down
            self._watcher.join()

    def _all_pending(self) -> list[Pending]:
        return [*self._steps.values(), *self._calls.values()]

    # -- deadlines -------------------------------------------------------------------------------------------

    def _mark_settled(self, pending: Pending) -> None:
        """The caller sets the future once it has released the lock. The next step's time begins."""
        pending.settled = True
        pending.deadline = pending.ask_at = math.inf
        if isinstance(pending, PendingStep):
            oldest = next(iter(self._unsettled_steps.values()))
            del self._unsettled_steps[pending.step_id]
            if oldest is pending:
                self._start_oldest()

    def _start_oldest(self) -> None:
        """The time of the oldest step begins, if it has not begun; not while the engine keeps it waiting for masks."""
        oldest = next(iter(self._unsettled_steps.values()), None)
        if oldest is not None and not oldest.awaits_masks and oldest.deadline == math.inf:
            self._set_deadline(oldest, self._step_budget)

    def _set_deadline(self, pending: Pending, seconds: float) -> None:
        """The watcher is not woken by a deadline later than the one it sleeps for: no step costs a thread switch."""
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
                    self._watcher_wakes_at = self._next_time()
                    seconds = self._watcher_wakes_at - now
                    self._changed.wait(min(max(seconds, 0.0), threading.TIMEOUT_MAX))
            for settlement in settlements:
                settlement()
            self._ask_all(asked)

    def _next_time(self) -> float:
        return min((min(pending.ask_at, pending.deadline) for pending in self._all_pending()), default=math.inf)

    def _due_questions(self, now: float) -> list[int]:
        """The ranks that must be asked now. If the watcher comes late, the deadline moves, so that they have time to answer."""
        asked: set[int] = set()
        for pending in self._all_pending():
            if pending.ask_at <= now:
                pending.deadline += now - pending.ask_at
                pending.ask_at = math.inf
                asked |= pending.awaited
        return sorted(asked)

    def _ask_all(self, ranks: Sequence[int]) -> None:
        """The caller must not hold the lock: a rank in this process answers during the call."""
        with self._changed:
            for rank in ranks:
                self._activities.pop(rank, None)
        for rank in ranks:
            self._ask(rank)

    def _expire(self, now: float) -> list[Settlement]:
        settlements: list[Settlement] = []
        for pending in self._all_pending():
            if pending.deadline <= now and pending.ask_at == math.inf:
                error = self._timeout_error(pending)
                self._mark_settled(pending)
                if isinstance(pending, PendingStep):
                    self._note_error(error)
                settlements.append(partial(pending.fail, error))
        return settlements

    def _describe_silent(self, pending: Pending) -> tuple[list[int], str]:
        """The ranks that have not answered the step, and what each is doing. First come those that did not answer the question,
        last those that wait for another rank."""

        def order(rank: int) -> tuple[bool, bool, int]:
            activity = self._activities.get(rank)
            return activity is not None, activity is not None and activity.is_waiting, rank

        ranks = sorted(pending.awaited, key=order)
        return ranks, ", ".join(f"rank {rank} ({self._describe(rank)})" for rank in ranks)

    def _describe(self, rank: int) -> str:
        if (activity := self._activities.get(rank)) is not None:
            return f"{activity.text}, waiting for another rank" if activity.is_waiting else activity.text
        newest = self._newest_replies.get(rank)
        answered = "has answered no step yet" if newest is None else f"answered step {newest} last"
        return "; ".join(filter(None, (self._state(rank), f"does not say what it is doing; {answered}")))

    def _timeout_error(self, pending: Pending) -> RankError:
        ranks, silent = self._describe_silent(pending)
        if isinstance(pending, PendingCall):
            message = f"{pending.name} had no reply within {pending.timeout:g} s from {silent}"
        else:
            message = (
                f"{pending.name} had no reply within {self._step_budget:g} s from {silent}. If a step may take longer, "
                f"raise INFLIGHT_EXECUTE_MODEL_TIMEOUT_SECONDS"
            )
        return pending.error(StepTimeoutError, message, ranks[0])
