"""The columns of requests, against what the mock engine has been given and has told."""

from __future__ import annotations

from inflight.interface.engine_view import COLUMNS, STATES
from inflight.scheduler.watched_state import watched_state
from tests.support.mock_engine import MockEngine


def test_columns_of_running_and_waiting_requests() -> None:
    engine = MockEngine(max_num_seqs=2)
    prompts = {"a": list(range(1, 11)), "b": list(range(1, 11)), "c": [3, 4, 5]}
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens=6)
    for _ in range(3):
        engine.step()
    names, columns, blocks = watched_state(engine.scheduler)
    assert names == ("a", "b", "c") and len(blocks) == engine.pool.num_blocks
    rows = {name: dict(zip(COLUMNS, row, strict=True)) for name, row in zip(names, columns.tolist(), strict=True)}
    states = [STATES[row["state"]] for row in rows.values()]
    assert states == ["running", "running", "waiting"]
    for name, row in rows.items():
        assert row["prompt"] == len(prompts[name]) and row["emitted"] == len(engine.outputs.get(name, ()))
        assert row["computed"] <= row["prompt"] + row["emitted"]
        assert (row["blocks"] > 0) == (name != "c")
    engine.run()
    names, columns, blocks = watched_state(engine.scheduler)
    assert names == () and columns.shape == (0, len(COLUMNS)) and set(blocks[1:]) <= {0, 1}
