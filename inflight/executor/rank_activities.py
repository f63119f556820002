"""`RankActivities`: what each rank says that it is doing. Timeout errors are made from these answers.

Shortly before a deadline the `ReplyTable` asks each rank that has not replied to its command what it is doing. On the rank, a
thread with no other work answers. If a rank does not answer even this question, its process is stopped, or it hangs while it
holds the GIL, or the link to it is broken. Then the timeout error names this rank. If all ranks answer, the error names a rank
that does not wait for another rank.
"""

from __future__ import annotations

from collections.abc import Callable

from inflight.errors import RankError, StepTimeoutError
from inflight.executor.pending import Pending, PendingCall, PendingStep
from inflight.interface.messages import WorkerActivity


class RankActivities:
    """Only used while the lock of the `ReplyTable` is held.

    Args:
        state: returns what is known of a rank that does not answer the question, or "" if nothing is known. Must not wait.

    Attributes:
        answers: rank -> the rank's answer to the last question. A rank that has not answered is absent.
        newest_replies: rank -> the id of the step of the rank's last reply.
    """

    def __init__(self, state: Callable[[int], str]) -> None:
        self._state = state
        self.answers: dict[int, WorkerActivity] = {}
        self.newest_replies: dict[int, int] = {}

    def forget(self) -> None:
        """Forget all answers and replies, because the ranks begin anew after a fault (recovery.py)."""
        self.answers.clear()
        self.newest_replies.clear()

    def timeout_error(self, pending: Pending, step_budget: float) -> RankError:
        """Returns the error of a command that was not answered before its deadline."""
        ranks, silent = self._describe_silent(pending)
        if isinstance(pending, PendingCall):
            message = f"{pending.name} had no reply within {pending.timeout:g} s from {silent}"
        else:
            budget = pending.budget if isinstance(pending, PendingStep) else step_budget
            message = f"{pending.name} had no reply within {min(budget, step_budget):g} s from {silent}"
            if budget >= step_budget:
                message += ". If a step may take longer, raise INFLIGHT_EXECUTE_MODEL_TIMEOUT_SECONDS"
        return pending.error(StepTimeoutError, message, ranks[0])

    def silence_behind(self, error: RankError, pending: Pending) -> RankError:
        """Returns an error that names the ranks that have not replied to `pending`.

        Used if each known error, `error` included, was raised because another rank has failed. Then a rank that has not replied
        must be the cause.
        """
        ranks, silent = self._describe_silent(pending)
        message = f"{pending.name} had no reply from {silent}, for which rank {error.rank} waited: {error}"
        return pending.error(StepTimeoutError, message, ranks[0])

    def _describe_silent(self, pending: Pending) -> tuple[list[int], str]:
        """Returns the ranks that the future waits for, and text with the activity of each. Ranks that did not answer the
        question come first. Ranks that wait for another rank come last."""

        def order(rank: int) -> tuple[bool, bool, int]:
            activity = self.answers.get(rank)
            return activity is not None, activity is not None and activity.is_waiting, rank

        ranks = sorted(pending.awaited, key=order)
        return ranks, ", ".join(f"rank {rank} ({self._describe(rank)})" for rank in ranks)

    def _describe(self, rank: int) -> str:
        if (activity := self.answers.get(rank)) is not None:
            if activity.is_waiting:
                return f"{activity.text}, waiting for another rank"
            return activity.text
        newest = self.newest_replies.get(rank)
        answered = "has answered no step yet" if newest is None else f"answered step {newest} last"
        return "; ".join(filter(None, (self._state(rank), f"does not say what it is doing; {answered}")))
