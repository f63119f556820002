"""`inflight trace`: a workload runs, its steps are written as a trace, and their figures printed."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import Result

from tests.unit.entrypoints.fake_engine import FakeEngine
from tests.unit.entrypoints.runner import invoke


def run(*arguments: str, engine: FakeEngine) -> Result:
    return invoke(["trace", *arguments], obj=engine)


def test_the_trace_holds_the_workload_without_its_warm_up(tmp_path: Path) -> None:
    engine, path = FakeEngine(), tmp_path / "trace.json"
    done = run("--batch-size", "2", "--input-len", "5", "--output-len", "6", "-o", str(path), engine=engine)
    assert done.exit_code == 0, done.output
    assert set(engine.params) == {"warm-up-0", "custom-0", "custom-1"}
    assert engine.args is not None and engine.args.skip_tokenizer_init and not engine.args.enable_prefix_caching
    entries = json.loads(path.read_text())["traceEvents"]
    names = {entry["args"]["name"] for entry in entries if entry["name"] == "process_name"}
    assert names == {"engine", "rank 0"}
    assert {entry["args"]["step"] for entry in entries if entry["ph"] == "X"} == {9, 10, 11, 12, 13, 14}


def test_figures_as_a_table() -> None:
    lines = [line.split() for line in run("-w", "decode1", engine=FakeEngine()).stdout.splitlines()]
    assert lines == [
        ["p50", "us", "p99", "us"],
        ["engine", "plan", "1000.0", "1000.0"],
        ["rank", "0", "prepare", "1000.0", "1000.0"],
        ["rank", "0", "forward", "8000.0", "8000.0"],
        ["rank", "0", "step", "period", "10000.0", "10000.0"],
        ["rank", "0", "device", "idle", "2000.0", "2000.0"],
        "rank 0 device idle for 20.0% of 127 periods, 0.0% of the host's work ran while the device was busy".split(),
    ]


def test_figures_as_json() -> None:
    figures = json.loads(run("-w", "decode1", "--json", engine=FakeEngine()).stdout)
    assert figures["engine_phases"]["plan"] == {"p50": 1000.0, "p99": 1000.0}
    assert figures["ranks"]["rank 0"]["num_periods"] == 127
    assert figures["ranks"]["rank 0"]["hidden_share"] == 0.0


def test_one_step_gives_no_figures() -> None:
    done = run("-w", "prefill", engine=FakeEngine(max_model_len=2000))
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == "rank 0  no figures, because no two steps ran directly after each other"


def test_a_wrong_workload_is_refused() -> None:
    done = run("-w", "decode7", engine=FakeEngine())
    assert done.exit_code == 2 and "unknown workload 'decode7'" in done.output
