"""`Followers`: the children of n > 1, except the first, which is their leader. They wait while the leader computes the prompt.

A follower is admitted once earlier plans compute all of the prompt except its last token. Then it shares the leader's blocks.
These steps may still be in flight: the follower's step runs after them, and if one of them fails, it is void, too.
"""

from __future__ import annotations

from collections.abc import Mapping

from inflight.scheduler.request import Request, RequestStatus
from inflight.scheduler.request_queue import RequestQueue


class Followers:
    """Holds followers outside the queue's order, so that no plan looks at them before their leader is ready.

    Args:
        requests: the scheduler's dict of all requests that have not ended, by id.
        queue: the scheduler's queue of waiting requests.
    """

    def __init__(self, requests: Mapping[str, Request], queue: RequestQueue, block_size: int) -> None:
        self._requests = requests
        self._queue = queue
        self._block_size = block_size
        self._held: dict[str, list[Request]] = {}  # by the id of the leader; some may have been aborted

    def must_wait(self, request: Request) -> bool:
        """Whether the request is a follower, and its leader has prompt tokens left that no plan computes."""
        if request.status is not RequestStatus.WAITING or request.num_prompt_tokens <= self._block_size:
            return False
        leader = self._requests.get(request.core.prompt_leader or "")
        return leader is not None and not _is_ready(leader)

    def hold_first(self) -> None:
        """The first request of the queue must wait: hold it until its leader is ready or has ended."""
        follower = self._queue.hold_first()
        self._held.setdefault(follower.core.prompt_leader or "", []).append(follower)

    def release(self, leader: Request) -> None:
        """Put followers back if their leader is ready or has ended. To be called whenever the leader may have become so."""
        if leader.request_id in self._held and (_is_ready(leader) or leader.status is RequestStatus.FINISHED):
            for follower in self._held.pop(leader.request_id):
                self._queue.release(follower)

    def running_leader(self, request: Request) -> Request | None:
        """The leader whose prompt blocks the follower shares when it is first admitted. None if the leader does not run."""
        leader = self._requests.get(request.core.prompt_leader or "")
        if leader is None or leader.status is not RequestStatus.RUNNING or request.status is not RequestStatus.WAITING:
            return None
        return leader

    def is_held(self, request: Request) -> bool:
        """For tests."""
        return request in self._held.get(request.core.prompt_leader or "", ())

    def check_integrity(self) -> None:
        """Assert that only followers that must wait are held. For tests."""
        for leader_id, held in self._held.items():
            assert leader_id in self._requests, leader_id
            for request in held:
                assert request.status is RequestStatus.FINISHED or self.must_wait(request), request.request_id


def _is_ready(leader: Request) -> bool:
    return leader.num_computed_tokens >= leader.num_prompt_tokens - 1
