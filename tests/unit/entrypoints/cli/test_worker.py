"""`inflight worker`: its sizes reach the node, and are checked."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.executor import node
from inflight.executor.node import NodeArgs
from tests.unit.entrypoints.runner import invoke

LINE = "worker -tp 4 -pp 2 --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29501"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    run: list[Any] = []
    monkeypatch.setattr(node, "run_node", run.append)
    return run


def test_the_sizes_reach_the_node(run: list[Any]) -> None:
    done = invoke(LINE.split())
    assert done.exit_code == 0, done.output
    assert run == [
        NodeArgs(
            nnodes=2,
            node_rank=1,
            master_addr="10.0.0.1",
            master_port=29501,
            tensor_parallel_size=4,
            pipeline_parallel_size=2,
        )
    ]


@pytest.mark.parametrize(("old", "new"), [("-tp 4", "-tp 0"), ("29501", "70000")])
def test_a_size_out_of_bounds_starts_nothing(run: list[Any], old: str, new: str) -> None:
    done = invoke(LINE.replace(old, new).split())
    assert done.exit_code == 2 and run == []
    assert f"={new.split()[-1]} " in done.output
