"""`Scheduler`: a `StepScheduler` that also aborts requests, drops the steps of a fault, and tells its state.

What a step does is in step_scheduler.py. Nothing here runs in a step without a fault.
"""

from collections.abc import Collection

from inflight.errors import ErrorKind
from inflight.interface.step import GrammarOutput, SchedulerOutput
from inflight.scheduler.integrity import check_requests, describe_requests
from inflight.scheduler.plan import make_plan
from inflight.scheduler.request import RequestStatus
from inflight.scheduler.step_scheduler import StepScheduler


class Scheduler(StepScheduler):
    def abort_requests(self, request_ids: Collection[str]) -> None:
        """End requests at once, whatever their status. Ids of unknown or ended requests are ignored."""
        for request_id in request_ids:
            if (request := self._requests.get(request_id)) is not None:
                self._finish(request)
        self._failed = [output for output in self._failed if output.request_id not in request_ids]

    def plan_nothing(self) -> SchedulerOutput:
        """Returns the plan of a step without rows. It is not committed with `update_from_output`."""
        plan = make_plan(self._next_step_id, [], self._kv_cache.num_groups)
        self._next_step_id += 1
        return plan

    def wait_for_grammars(self, seconds: float | None = None, *, for_all: bool = True) -> None:
        """Wait until all grammars are compiled (`for_all=False`: until one is compiled), but at most `seconds`."""
        self._grammars.wait(seconds, for_all=for_all)

    def blame(self, request_ids: Collection[str], reason: str) -> None:
        """After `void`: a step with these requests has failed. If one is the cause (`Quarantine`), it and its siblings end."""
        requests = [self._requests[request_id] for request_id in request_ids if request_id in self._requests]
        if (guilty := self.quarantine.record_failed_step(requests)) is not None:
            for each in [each for each in self._requests.values() if each.core.is_sibling(guilty.core)]:
                self.fail(each.request_id, reason, ErrorKind.ENGINE)

    def is_oldest_step_dead(self) -> bool:
        """Whether every request of the oldest step in flight has ended."""
        requests = self._in_flight[0][1] if self._in_flight else []
        return bool(requests) and all(request.status is RequestStatus.FINISHED for request in requests)

    def void(self) -> list[tuple[int, GrammarOutput]]:
        """Drop all steps in flight. Called when a step has failed, because later steps ran with wrong inputs.

        All running requests wait again with all their tokens, also those that are in no step in flight. When they are scheduled
        again, all their data is sent, because the workers' copies may be wrong, and a new rank has none.

        Returns (step id, empty masks) for each step whose workers still wait for masks. The caller must send them.
        """
        for _, requests in self._in_flight:
            for request in requests:
                request.num_in_flight = 0
                request.num_planned_tokens = request.num_tokens
        self._in_flight.clear()
        for request in list(self._running):
            self._requeue(request)
        self.limits.void()
        if self.encoder is not None:
            self.encoder.reset()
        return self._grammars.give_up_masks()

    def reset_prefix_cache(self, *, reset_host_pool: bool = False) -> None:
        """Remove all blocks from the prefix cache. Running requests keep their blocks, but no other request can reuse them.
        With `reset_host_pool` the host pool of `transfers` is emptied, too."""
        self.transfers.reset(with_host_pool=reset_host_pool)
        self._kv_cache.reset_prefix_cache(request.blocks for request in self._running)

    def describe(self) -> str:
        """Returns the state of the cache and of the requests as text, for an error dump."""
        counts = f"{len(self._running)} requests run, {len(self._waiting)} wait; {self._kv_cache.pool.describe()}; "
        return f"{counts}{len(self._in_flight)} steps in flight\n{describe_requests(self._requests.values())}"

    def check_integrity(self) -> None:
        """Assert that slots, blocks, queues and grammars agree. For tests. May be called between any two calls."""
        live = list(self._requests.values())
        in_flight = (requests for _, requests in self._in_flight)
        state = self._running, self._waiting, in_flight, self._free_slots, self._grammars, self.sharing
        check_requests(live, *state, self.transfers, self.encoder)
        self._kv_cache.check_integrity([request.blocks for request in live], self.transfers.referenced_blocks)
