"""An engine without two of its edges, which are drawn by lot: a tier, a tool parser, an API, a family, an executor and others.

Each run draws two of different kinds, by the number of commits. A failure names them. To try others:
INFLIGHT_UNPLUG="tier fs, executor ray" pytest tests/e2e/test_unplugged_edges.py
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from datetime import date
from pathlib import Path

from inflight import LLM, SamplingParams
from tests.architecture.edges import all_edges, copy_without, importers_of, with_dependents
from tests.architecture.source import PACKAGE, ROOT, Package

# The rest of the package is loaded, generates, and answers by HTTP
WITHOUT = """
import importlib
import pathlib
import sys

import inflight
from inflight import LLM, SamplingParams
from inflight.entrypoints.apis import APIS
from inflight.executor.selector import OWN
from tests.unit.entrypoints.api_client import serving

assert pathlib.Path(inflight.__file__).parent == pathlib.Path("inflight").absolute()
for module in sys.argv[1:]:
    importlib.import_module(module)
backend = "uni" if "uni" in OWN else "mp"
with LLM(max_model_len=256, kv_cache_memory_bytes=2**22, seed=0, distributed_executor_backend=backend) as llm:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    (output,) = llm.generate(["Once upon a time"], params, use_tqdm=False)
with serving() as api:
    path = "/v1/chat/completions" if "openai" in APIS else "/v1/messages"
    answer = api.post(path, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20})
    assert answer.status == 200, answer.json
    assert api.get("/openapi.json").status == 200
print(output.outputs[0].token_ids)
"""


def draw() -> list[str]:
    """The names of two edges."""
    asked = os.environ.get("INFLIGHT_UNPLUG")
    if asked:
        return asked.split(", ")
    counted = subprocess.run(["git", "rev-list", "--count", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    seed = int(counted.stdout) if counted.returncode == 0 else date.today().toordinal()
    chance, edges = random.Random(seed), all_edges()
    kinds = chance.sample(sorted({each.kind for each in edges}), 2)
    return [str(chance.choice([each for each in edges if each.kind == kind])) for kind in kinds]


def test_without_two_edges_drawn_by_lot_the_engine_runs(tmp_path: Path) -> None:
    names = draw()
    importers = importers_of(Package(ROOT / PACKAGE))
    edges = [with_dependents(each, all_edges(), importers) for each in all_edges() if str(each) in names]
    assert len(edges) == len(names), f"unknown: {names}"
    copy_without(edges, ROOT / PACKAGE, tmp_path / PACKAGE)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    tables = sorted({table for edge in edges for table in edge.tables})
    modules = [f"{PACKAGE}.{table.removesuffix('.py').replace('/', '.').removesuffix('.__init__')}" for table in tables]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *modules],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    again = f'without them it fails: INFLIGHT_UNPLUG="{", ".join(names)}" pytest {Path(__file__).relative_to(ROOT)}'
    assert done.returncode == 0, f"{again}\n{done.stderr}"
    with LLM(max_model_len=256, kv_cache_memory_bytes=2**22, seed=0, distributed_executor_backend="uni") as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        (output,) = llm.generate(["Once upon a time"], params, use_tqdm=False)
    assert done.stdout.splitlines()[-1] == str(output.outputs[0].token_ids), again
