"""`RankActivities`: what each rank says it is doing, and the errors of the ranks that let the engine wait too long.

Shortly before a deadline the `ReplyTable` asks each rank that has not answered what it is doing. On the rank a thread that does
nothing else answers. So a rank that does not answer this question is stopped, hangs while it holds the GIL, or is cut off, and
the error of the timeout names it. If all ranks answer, the error names a rank that is not waiting for another one.
"""

from __future__ import annotations

from collections.abc import Callable

from inflight.errors import RankError, StepTimeoutError
from inflight.executor.pending import Pending, PendingCall
from inflight.interface.messages import WorkerActivity


class RankActivities:
    """The lock of the `ReplyTable` guards it.

    Args:
        state: describes a rank that does not answer the question; "" if nothing is known of it. Must not wait.

    Attributes:
        answers: rank -> the rank's answer to the last question.
        newest_replies: rank -> the last step that it answered.
    """

    def __init__(self, state: Callable[[int], str]) -> None:
        self._state = state
        self.answers: dict[int, WorkerActivity] = {}
        self.newest_replies: dict[int, int] = {}

    def timeout_error(self, pending: Pending, step_budget: float) -> RankError:
        """Returns the error of a command whose deadline has passed."""
        ranks, silent = self._describe_silent(pending)
        if isinstance(pending, PendingCall):
            message = f"{pending.name} had no reply within {pending.timeout:g} s from {silent}"
        else:
            message = (
                f"{pending.name} had no reply within {step_budget:g} s from {silent}. If a step may take longer, "
                f"raise INFLIGHT_EXECUTE_MODEL_TIMEOUT_SECONDS"
            )
        return pending.error(StepTimeoutError, message, ranks[0])

    def silence_behind(self, error: RankError, pending: Pending) -> RankError:
        """Returns the cause of `error`, an echo, if the ranks that have not answered `pending` have sent no failure."""
        ranks, silent = self._describe_silent(pending)
        message = f"{pending.name} had no reply from {silent}, for which rank {error.rank} waited: {error}"
        return pending.error(StepTimeoutError, message, ranks[0])

    def _describe_silent(self, pending: Pending) -> tuple[list[int], str]:
        """Returns the ranks that the future waits for, and the activity of each. Ranks that did not answer the question come
        first, ranks that wait for another rank come last."""

        def order(rank: int) -> tuple[bool, bool, int]:
            activity = self.answers.get(rank)
            return activity is not None, activity is not None and activity.is_waiting, rank

        ranks = sorted(pending.awaited, key=order)
        return ranks, ", ".join(f"rank {rank} ({self._describe(rank)})" for rank in ranks)

    def _describe(self, rank: int) -> str:
        if (activity := self.answers.get(rank)) is not None:
            return f"{activity.text}, waiting for another rank" if activity.is_waiting else activity.text
        newest = self.newest_replies.get(rank)
        answered = "has answered no step yet" if newest is None else f"answered step {newest} last"
        return "; ".join(filter(None, (self._state(rank), f"does not say what it is doing; {answered}")))
