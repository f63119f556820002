"""What a watcher is told: the snapshot and all deltas together are the newest view, and nothing is told twice."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from inflight.engine.serving.engine_client import EngineState
from inflight.engine.serving.engine_views import EngineViews
from inflight.entrypoints.engine_api.live_feed import MAX_SPANS, LiveFeed
from inflight.entrypoints.json_lines import to_json
from inflight.interface.engine_view import COLUMNS, EngineView, Watch
from inflight.interface.statistics import FaultStatus
from tests.unit.entrypoints.api_client import SETTINGS, serving


def random_view(rng: random.Random, step: int) -> EngineView:
    names = tuple(f"request-{i}" for i in range(12) if rng.random() < 0.5)
    rows = [[rng.randrange(3), *(rng.randrange(5) for _ in COLUMNS[1:])] for _ in names]
    spans = [[rng.randrange(2), 0, step, 1000 * step, 5000] for _ in range(rng.randrange(3))]
    return EngineView(
        step_id=step // 3,
        num_ranks=1,
        request_ids=names,
        requests=np.array(rows, dtype=np.int32).reshape(len(names), len(COLUMNS)),
        blocks=bytes(rng.choice((0, 0, 0, 1, 2, 3)) for _ in range(30 if step < 40 else 50)),
        phases=("forward",),
        spans=np.array(spans, dtype=np.int64).reshape(len(spans), 5),
    )


class Watcher:
    """Puts events together, as the page does."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}
        self.requests: dict[str, list[int]] = {}
        self.blocks: list[int] = []
        self.spans: list[list[Any]] = []

    def take(self, event: dict[str, Any]) -> None:
        for news in json.loads(to_json(event))["engines"]:
            self.known |= news
            if "num_blocks" in news:
                self.blocks = [0] * news["num_blocks"]
            for name in news.get("gone", ()):
                del self.requests[name]
            self.requests |= news.get("requests", {})
            for first, digits in news.get("blocks", ()):
                self.blocks[first : first + len(digits)] = map(int, digits)
            self.spans += news.get("spans", ())


def replica() -> Any:
    """A replica as a feed sees it."""
    return SimpleNamespace(number=3, state=EngineState.CONNECTED, fault_status=FaultStatus())


def test_the_snapshot_and_the_deltas_are_the_newest_view() -> None:
    rng = random.Random(1)
    feed, watcher = LiveFeed([replica()]), Watcher()
    first = feed.event()
    assert first is not None and first["type"] == "snapshot" and first["columns"] == COLUMNS
    watcher.take(first)
    assert feed.event() is None
    num_spans = 0
    for step in range(80):
        view = random_view(rng, step)
        feed.replicas[0].take(view)
        num_spans += len(view.spans)
        if rng.random() < 0.3:
            continue  # the watcher is slow: the next event tells both
        event = feed.event()
        if event is not None:
            assert event["type"] == "delta"
            watcher.take(event)
        rows = dict(zip(view.request_ids, view.requests.tolist(), strict=True))
        assert watcher.requests == rows and bytes(watcher.blocks) == view.blocks
        assert watcher.known["step"] == view.step_id and len(watcher.spans) == num_spans
        assert feed.event() is None


def test_a_fault_is_told_without_the_text_of_its_cause() -> None:
    engine = replica()
    feed = LiveFeed([engine])
    feed.event()
    engine.state = EngineState.LOST
    engine.fault_status = FaultStatus(state="recovering", last_cause="secret /path", last_kind="rank_died")
    event = feed.event()
    assert event is not None and "secret" not in json.dumps(event)
    (news,) = event["engines"]
    assert news["engine"] == 3 and news["state"] == "lost" and news["faults"]["last_kind"] == "rank_died"


def test_a_watcher_that_does_not_read_costs_little() -> None:
    feed = LiveFeed([replica()])
    spans = np.array([[0, 0, step, 0, 0] for step in range(MAX_SPANS)], dtype=np.int64)
    for _ in range(3):
        feed.replicas[0].take(EngineView(step_id=1, num_ranks=1, phases=("plan",), spans=spans))
    event = feed.event()
    assert event is not None and len(event["engines"][0]["spans"]) == MAX_SPANS


def test_an_engine_makes_views_only_while_somebody_watches() -> None:
    sent: list[object] = []
    views = EngineViews(sent.append)
    seen: list[EngineView] = []
    view = EngineView(step_id=1, num_ranks=1)
    views.take(view)
    views.renew()
    with views.watched(seen.append):
        with views.watched(seen.append):
            views.take(view)
        views.take(view)
        assert sent == [Watch(is_wanted=True)] * 2 and len(seen) == 3
        views.renew()  # a new process of the engine
        assert sent == [Watch(is_wanted=True)] * 3
    assert sent[3:] == [Watch(is_wanted=False)]
    views.take(view)
    assert len(seen) == 3


def test_both_endpoints_need_the_key_and_the_end_of_a_request_the_key_of_an_admin() -> None:
    with serving(replace(SETTINGS, api_keys=("first-key-1",), admin_api_key="admin-key-1")) as api:
        assert api.get("/v1/engine/live").status == 401
        key = {"authorization": "Bearer first-key-1"}
        assert api.post("/v1/engine/abort", {"request_id": "x"}, key).status == 401
        foreign = {"authorization": "Bearer admin-key-1", "content-type": "text/plain", "origin": "http://evil.example"}
        assert api.post("/v1/engine/abort", {"request_id": "x"}, foreign).status == 415
