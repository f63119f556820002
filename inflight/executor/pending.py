"""`Pending`: a command (a step or a remote call) and the replies of the ranks so far. reply_table.py has the rules for replies.

A `Pending` is *settled* when its future has a result or an error, or is about to get one. It is *complete* when all ranks have
replied. Before a `Pending` is complete, it can be settled by an error, by a timeout, or by the reply of one rank, if the caller
asked only for this reply.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from inflight.errors import ConfigError, InflightError, RankError, StepError
from inflight.executor.failures import named_error
from inflight.interface.messages import ReplyKey, WorkerFailure
from inflight.interface.step import ModelRunnerOutput, SchedulerOutput

MAX_REQUEST_IDS_SHOWN = 8

# The engine makes these calls when it starts. Their errors may be mistakes that the user can correct.
START_UP_CALLS = frozenset({"get_kv_cache_specs", "determine_available_memory", "initialize_from_config"})


class Pending(ABC):
    """The lock of the `ReplyTable` protects all attributes but `future`.

    Args:
        result_rank: the rank whose value is the result. If None, the result is a list of the values of all ranks.
    """

    step_id: int | None = None  # None for a call
    request_ids: Sequence[str] = ()

    def __init__(self, key: ReplyKey, num_ranks: int, result_rank: int | None) -> None:
        self.key = key
        self.result_rank = result_rank
        self.future: Future[Any] = Future()  # Any: a step gives its ModelRunnerOutput, a call what the method returned
        self.future.set_running_or_notify_cancel()  # from now on it cannot be cancelled, because the ranks have the message
        self.missing = set(range(num_ranks))  # ranks that have not replied yet
        self.values: dict[int, Any] = {}  # rank -> its result, for ranks that have replied without a failure
        self.settled = False
        # when the future gets a timeout error, as a time of time.monotonic(); infinite while no time limit runs
        self.deadline = math.inf
        # when the awaited ranks are asked what they are doing, shortly before the deadline; infinite when that is done
        self.ask_at = math.inf

    @property
    @abstractmethod
    def name(self) -> str:
        """The command's name in error messages."""

    @property
    def awaited(self) -> Set[int]:
        """The ranks that the future still waits for."""
        return self.missing

    def result(self) -> Any:
        """Returns the result of the future. Call it when all ranks that the future waits for have replied."""
        if self.result_rank is not None:
            return self.values[self.result_rank]
        return [self.values[rank] for rank in sorted(self.values)]

    def error(self, kind: type[RankError], message: str, rank: int) -> RankError:
        return kind(message, rank=rank, step_id=self.step_id, request_ids=self.request_ids)

    def failure_error(self, rank: int, failure: WorkerFailure) -> InflightError:
        """Returns the error that the future gets if a rank has replied with a failure."""
        return StepError(
            f"{self.name} failed on rank {rank}: {failure.type_name}: {failure.message}",
            rank=rank,
            step_id=self.step_id,
            request_ids=self.request_ids,
            worker_traceback=failure.traceback,
            type_name=failure.type_name,
            is_echo=failure.is_echo,
            lost_ranks=failure.lost_ranks,
        )


class PendingStep(Pending):
    """A step. Its future waits for all ranks. The result is the output of `output_rank`, with the compute time of the slowest
    rank. It says that cores are shared if this is so on any rank, and has the refused images of all ranks."""

    def __init__(self, plan: SchedulerOutput, num_ranks: int, output_rank: int, budget: float = math.inf) -> None:
        super().__init__(("step", plan.step_id), num_ranks, output_rank)
        self.budget = budget  # how many seconds the step may take
        self.plan, self.step_id, self.request_ids = plan, plan.step_id, plan.request_ids
        # whether the step's grammar masks must still be sent; the time limit of the step begins after that
        self.awaits_masks = len(plan.grammar_rows) > 0

    def result(self) -> ModelRunnerOutput:
        output: ModelRunnerOutput = super().result()
        slowest = max(each.compute_seconds for each in self.values.values())
        shares_cores = any(each.shares_cores for each in self.values.values())
        refused = tuple(image for each in self.values.values() for image in each.refused_images)
        return replace(output, compute_seconds=slowest, shares_cores=shares_cores, refused_images=refused)

    @property
    def name(self) -> str:
        shown = list(self.plan.request_ids[:MAX_REQUEST_IDS_SHOWN])
        more = len(self.plan.request_ids) - len(shown)
        return f"step {self.plan.step_id} (requests: {', '.join(shown)}{f' and {more} more' if more else ''})"


class PendingCall(Pending):
    """A remote call (`collective_rpc`). Its future waits for all ranks, or for `unique_reply_rank` only."""

    def __init__(
        self, call_id: int, method: str, num_ranks: int, timeout: float | None, unique_reply_rank: int | None
    ) -> None:
        super().__init__(("call", call_id), num_ranks, unique_reply_rank)
        self.method = method
        self.timeout = timeout

    @property
    def name(self) -> str:
        return f"collective_rpc({self.method!r})"

    @property
    def awaited(self) -> Set[int]:
        return self.missing if self.result_rank is None else self.missing & {self.result_rank}

    def failure_error(self, rank: int, failure: WorkerFailure) -> InflightError:
        named = named_error(rank, failure) if self.method in START_UP_CALLS else None
        return named if isinstance(named, ConfigError) else super().failure_error(rank, failure)
