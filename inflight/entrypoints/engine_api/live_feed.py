"""`LiveFeed`: what one watcher of the engines is told: a snapshot, and then what has changed. Counts and ids, never texts.

{"type": "snapshot", "columns", "states", "block_states", "engines": [...]}: the names of the columns of requests, of the states
of requests and of blocks, and for each replica all that is known of it
{"type": "delta", "engines": [...]}: for each replica that has news the members that are new

A replica has: engine (its number), state, faults, step, ranks, requests {id: columns}, gone [ids], num_blocks, blocks [[first
block, a digit for the state of each]], spans [[lane, phase, step, begin, duration]] in microseconds; lane 0 is the engine, lane
1 + r is rank r.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from inflight.engine.serving.engine_client import EngineClient
from inflight.interface.engine_view import BLOCK_STATES, COLUMNS, STATES, EngineView

MAX_SPANS = 4000  # that wait to be sent, for each replica; the newest are kept
_ZERO = ord("0")

Json = dict[str, Any]  # Any: JSON


class ReplicaFeed:
    """What a watcher knows of one replica, and what is new for it."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._view: EngineView | None = None
        self._spans: deque[list[int | str]] = deque(maxlen=MAX_SPANS)
        # what the watcher was told
        self._known: Json = {}
        self._requests: dict[str, list[int]] = {}
        self._blocks = np.empty(0, dtype=np.uint8)

    def take(self, view: EngineView) -> None:
        self._view = view
        for lane, phase, step, begin, duration in view.spans.tolist():
            self._spans.append([lane, view.phases[phase], step, begin // 1000, duration // 1000])

    def news(self) -> Json:
        """The members that have changed since the last call. Empty if none has."""
        status = self._engine.fault_status
        # the text of the cause may name files and requests, so it is at /fault_tolerance/status only
        faults = {name: value for name, value in asdict(status).items() if name != "last_cause"}
        now: Json = {"state": self._engine.state.name.lower(), "faults": faults}
        view = self._view
        if view is not None:
            now |= {"step": view.step_id, "ranks": view.num_ranks, "num_blocks": len(view.blocks)}
        found = {name: value for name, value in now.items() if self._known.get(name) != value}
        self._known = now
        if view is not None:
            found |= self._changed_requests(view)
            found |= self._changed_blocks(view)
        if self._spans:
            found["spans"] = list(self._spans)
            self._spans.clear()
        return {"engine": self._engine.number, **found} if found else {}

    def _changed_requests(self, view: EngineView) -> Json:
        requests = dict(zip(view.request_ids, view.requests.tolist(), strict=True))
        changed = {name: row for name, row in requests.items() if self._requests.get(name) != row}
        gone = [name for name in self._requests if name not in requests]
        self._requests = requests
        return ({"requests": changed} if changed else {}) | ({"gone": gone} if gone else {})

    def _changed_blocks(self, view: EngineView) -> Json:
        blocks = np.frombuffer(view.blocks, dtype=np.uint8)
        before = self._blocks if len(self._blocks) == len(blocks) else np.full(len(blocks), 255, dtype=np.uint8)
        self._blocks = blocks
        runs = [[first, (blocks[first:end] + _ZERO).tobytes().decode()] for first, end in _runs(before != blocks)]
        return {"blocks": runs} if runs else {}


def _runs(is_changed: np.ndarray[Any, np.dtype[np.bool_]]) -> Iterator[tuple[int, int]]:
    """[first, end) of each run of changed blocks."""
    edges = np.flatnonzero(np.diff(is_changed.astype(np.int8), prepend=0, append=0))
    return zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


class LiveFeed:
    """All replicas, for one watcher."""

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        self.replicas = [ReplicaFeed(engine) for engine in engines]
        self._has_begun = False

    def event(self) -> Json | None:
        """The next event; None if there is nothing new. The first one is the snapshot."""
        engines = [news for replica in self.replicas if (news := replica.news())]
        if self._has_begun:
            return {"type": "delta", "engines": engines} if engines else None
        self._has_begun = True
        return {
            "type": "snapshot",
            "columns": COLUMNS,
            "states": STATES,
            "block_states": BLOCK_STATES,
            "engines": engines,
        }
