"""One message sent to all ranks, and the replies so far: a step or a call.

A `Pending` is *settled* when its future has (or is about to have) a result or an error, and *complete* when all ranks have
replied. It can be settled before it is complete: by an error, a timeout, or the one reply that was wanted. Until it is
complete it stays in the `ReplyTable`, so that the replies still to come are known for what they are.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from concurrent.futures import Future
from typing import Any

from inflight.errors import ConfigError, InflightError, RankError, StepError, error_by_name
from inflight.interface.messages import WorkerFailure
from inflight.interface.step import ModelRunnerOutput, SchedulerOutput

MAX_REQUEST_IDS_SHOWN = 8

# calls that the engine makes as it starts: what goes wrong in them may be the user's to mend
START_UP_CALLS = frozenset({"get_kv_cache_specs", "determine_available_memory", "initialize_from_config"})


class Pending(ABC):
    """Everything but `future` is guarded by the lock of the `ReplyTable`."""

    def __init__(self, num_ranks: int) -> None:
        self.future: Future[Any] = Future()  # Any: of a step its ModelRunnerOutput, of a call what the method returned
        self.future.set_running_or_notify_cancel()  # it cannot be cancelled: the ranks have the message
        self.missing = set(range(num_ranks))  # ranks that have not replied
        self.settled = False
        self.deadline = math.inf  # time.monotonic(), of the future
        self.ask_at = math.inf  # shortly before the deadline: when to ask the silent ranks what they are doing

    @property
    @abstractmethod
    def name(self) -> str:
        """How an error message calls it."""

    @property
    def awaited(self) -> Set[int]:
        """The ranks that the future still waits for."""
        return self.missing

    @property
    def step_id(self) -> int | None:
        return None

    @property
    def request_ids(self) -> Sequence[str]:
        return ()

    def error(self, kind: type[RankError], message: str, rank: int) -> RankError:
        return kind(message, rank=rank, step_id=self.step_id, request_ids=self.request_ids)

    def failure_error(self, rank: int, failure: WorkerFailure) -> InflightError:
        """What the future fails with where a rank has raised."""
        return StepError(
            f"{self.name} failed on rank {rank}: {failure.type_name}: {failure.message}",
            rank=rank,
            step_id=self.step_id,
            request_ids=self.request_ids,
            worker_traceback=failure.traceback,
            type_name=failure.type_name,
            is_echo=failure.is_echo,
        )

    def resolve(self, result: Any) -> None:
        self.future.set_result(result)

    def fail(self, error: InflightError) -> None:
        self.future.set_exception(error)


class PendingStep(Pending):
    """A step. Its future waits for all ranks."""

    def __init__(self, plan: SchedulerOutput, num_ranks: int) -> None:
        super().__init__(num_ranks)
        self.plan = plan
        self.awaits_masks = len(plan.grammar_rows) > 0  # its time begins when they have been sent
        self.outputs: dict[int, ModelRunnerOutput] = {}

    @property
    def name(self) -> str:
        shown = list(self.plan.request_ids[:MAX_REQUEST_IDS_SHOWN])
        more = len(self.plan.request_ids) - len(shown)
        return f"step {self.plan.step_id} (requests: {', '.join(shown)}{f' and {more} more' if more else ''})"

    @property
    def step_id(self) -> int:
        return self.plan.step_id

    @property
    def request_ids(self) -> Sequence[str]:
        return self.plan.request_ids


class PendingCall(Pending):
    """A `collective_rpc`. Its future waits for all ranks, or for `unique_reply_rank` only."""

    def __init__(self, method: str, num_ranks: int, timeout: float | None, unique_reply_rank: int | None) -> None:
        super().__init__(num_ranks)
        self.method = method
        self.timeout = timeout
        self.unique_reply_rank = unique_reply_rank
        self.values: dict[int, Any] = {}

    @property
    def name(self) -> str:
        return f"collective_rpc({self.method!r})"

    def failure_error(self, rank: int, failure: WorkerFailure) -> InflightError:
        named = named_error(rank, failure) if self.method in START_UP_CALLS else None
        return named if isinstance(named, ConfigError) else super().failure_error(rank, failure)

    @property
    def awaited(self) -> Set[int]:
        return self.missing if self.unique_reply_rank is None else self.missing & {self.unique_reply_rank}

    def result(self) -> Any:
        """A list with one value per rank, or the value of the unique rank. All that are awaited have replied."""
        if self.unique_reply_rank is not None:
            return self.values[self.unique_reply_rank]
        return [self.values[rank] for rank in sorted(self.values)]


def named_error(rank: int, failure: WorkerFailure) -> InflightError | None:
    """What a rank has raised, of the same class, with the rank named and its traceback as a note; None as `error_by_name`."""
    error = error_by_name(failure.type_name, f"rank {rank}: {failure.message}")
    if error is not None:
        error.add_note(f"On rank {rank}:\n{failure.traceback}")
    return error
