"""How long the tests may take: a budget for each room, held against the times of the last measured run.

tests/durations.json has the seconds of each test file in one `make test` on an idle machine with two cores. docs/testing.md
says how it is written. Four processes share the cores, so a file's seconds are about twice its processor time.
"""

from __future__ import annotations

import json
from collections import Counter

from tests.architecture.source import ROOT

# Seconds of all tests together in one `make test`. Four processes make 2,880 in twelve minutes.
BUDGETS = {
    "benchmarks": 25,
    "conformance": 70,
    "e2e": 2480,
    "gpu": 10,
    "inflight_bench": 28,
    "page": 112,
    "scripts": 49,
    "unit": 23,  # the files directly in tests/unit
    "unit/attention": 60,
    "unit/config": 24,
    "unit/device": 10,
    "unit/distributed": 50,
    "unit/engine": 110,
    "unit/entrypoints": 159,
    "unit/executor": 75,
    "unit/interface": 20,
    "unit/kernels": 186,
    "unit/kv_cache": 10,
    "unit/kv_connector": 60,
    "unit/layers": 38,
    "unit/metrics": 10,
    "unit/model_loader": 125,
    "unit/models": 123,
    "unit/multimodal": 103,
    "unit/parsers": 90,
    "unit/processes": 25,
    "unit/sample": 80,
    "unit/scheduler": 30,
    "unit/spec_decode": 24,
    "unit/structured_output": 30,
    "unit/tokenizer": 26,
    "unit/weight_cache": 36,
    "unit/worker": 60,
    "lockstep": 116,  # of replicas, in whichever of these rooms
}
NEW_FILE_SECONDS = 10.0  # assumed for a file that tests/durations.json does not have yet


def room_of(file: str) -> str:
    if any(word in file for word in ("lockstep", "expert_worker", "expert_balance", "replica_experts")):
        return "lockstep"
    _, *folders, _ = file.split("/")
    return "/".join(folders[:2] if folders[0] == "unit" else folders[:1])


def seconds_by_room() -> Counter[str]:
    measured = json.loads((ROOT / "tests" / "durations.json").read_text())
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    found: Counter[str] = Counter()
    for file in files:
        if not file.startswith(("tests/architecture/", "tests/clients/")):
            found[room_of(file)] += measured.get(file, NEW_FILE_SECONDS)
    return found


def test_every_room_keeps_to_its_budget() -> None:
    found = seconds_by_room()
    assert set(found) <= set(BUDGETS), "a new room needs a budget"
    # rounded, because a sum of decimal fractions depends a little on their order
    over = {room: round(seconds) for room, seconds in found.items() if round(seconds, 3) > BUDGETS[room]}
    assert not over, (
        f"make these tests faster, or write tests/durations.json anew (docs/testing.md): {over}, of {BUDGETS}"
    )
