"""`EngineWatch`: makes the views of an engine core for front ends that watch it. Without one it does nothing.

A view is made after a commit, at most each `SECONDS`, and so seldom that views take at most `SHARE` of the time. Ranks are
asked for their timelines beside the steps, so no step waits for them.
"""

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

import numpy as np

from inflight.engine.core.engine_core import EngineCore
from inflight.engine.process.control_socket import FrontEndLink
from inflight.executor.executor import Executor
from inflight.interface.engine_view import EndRequests, EngineView, Int64Array, Watch
from inflight.scheduler.watched_state import watched_state
from inflight.timeline import Event

SECONDS = 0.1
SHARE = 0.01
ENDED = "who runs the server has ended the request"
MAX_SPANS = 2000  # of each lane in a view; older ones are left out


class EngineWatch:
    """Used by the thread of the step loop.

    Attributes:
        links: the front ends that watch.
    """

    def __init__(self) -> None:
        self.links: set[FrontEndLink] = set()
        self._next = 0.0
        self._sent_ns: dict[int, int] = {}  # lane -> the end of its last event that was sent
        self._asked: Future[list[list[Event]]] | None = None

    def take(self, link: FrontEndLink, message: Watch | EndRequests, core: EngineCore) -> None:
        if isinstance(message, EndRequests):
            for request_id in message.request_ids:
                core.scheduler.fail(request_id, ENDED, param="request_id")
        elif message.is_wanted and link not in self.links:
            self.links.add(link)
            self._next = 0.0
        elif message.is_wanted:
            return  # the next view comes soon
        else:
            self.leave(link)

    def leave(self, link: FrontEndLink) -> None:
        self.links.discard(link)

    def show(self, core: EngineCore, executor: Executor, *, is_reported: bool) -> None:
        """Send a view if it is time. `is_reported`: all front ends are told the engine's state now. If the engine then sleeps,
        the view cannot wait."""
        if not self.links:
            return
        begin = time.monotonic()
        if begin < self._next and (not is_reported or core.has_unfinished_requests()):
            return
        view = self._view(core, executor)
        for link in self.links:
            link.outbox.send(view)
        end = time.monotonic()
        self._next = max(begin + SECONDS, end + (end - begin) / SHARE)

    def _view(self, core: EngineCore, executor: Executor) -> EngineView:
        request_ids, requests, blocks = watched_state(core.scheduler)
        lanes = {0: self._new(0, core.timeline.events(self._sent_ns.get(0, 0)))}
        if self._asked is not None and self._asked.done():
            if self._asked.exception() is None:  # otherwise a rank was lost; the next call asks those that live
                lanes |= {1 + rank: self._new(1 + rank, events) for rank, events in enumerate(self._asked.result())}
            self._asked = None
        if self._asked is None and core.fault_status().state == "healthy":
            sent_ns = min((self._sent_ns.get(1 + rank, 0) for rank in range(executor.world_size)), default=0)
            self._asked = executor.collective_rpc("timeline_events", (sent_ns,), non_block=True, beside=True)
        phases = tuple(dict.fromkeys(event.phase for events in lanes.values() for event in events))
        return EngineView(
            step_id=max((event.step_id for event in lanes[0]), default=-1),
            num_ranks=executor.world_size,
            request_ids=request_ids,
            requests=requests,
            blocks=blocks,
            phases=phases,
            spans=_spans(lanes.items(), phases),
        )

    def _new(self, lane: int, events: Sequence[Event]) -> Sequence[Event]:
        """Those that have ended since the last view."""
        sent = self._sent_ns.get(lane, 0)
        new = [event for event in events if event.end_ns > sent][-MAX_SPANS:]
        self._sent_ns[lane] = max((event.end_ns for event in new), default=sent)
        return new


def _spans(lanes: Iterable[tuple[int, Sequence[Event]]], phases: Sequence[str]) -> Int64Array:
    index = {phase: i for i, phase in enumerate(phases)}
    rows = [
        (lane, index[event.phase], event.step_id, event.start_ns, event.end_ns - event.start_ns)
        for lane, events in lanes
        for event in events
    ]
    return np.array(rows, dtype=np.int64).reshape(len(rows), 5)
