"""How long the path of a token is, measured by running it, and what `scripts/path` counts."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "path"

# The most that the path may have: lines of code, and nodes of the syntax tree divided by 5, so that denser code wins nothing.
# These numbers may only fall, but for a capability that each step must ask for: they rose twice, for transfers of KV blocks
# (2026-11-27) and for images (2026-11-30). `code` is the promise of at most 6,500 lines. Comments have no limit. Where there
# are no C++ kernels, the path is about 1,000 lines shorter.
MOST = {"code": 6_500, "size": 7_340}

# What a plain prompt does not need, and so should not enter
BESIDE = {
    "grammars": ["structured_output/*", "parsers/*", "scheduler/grammars.py"],
    "drafts": ["spec_decode/*"],
    "faults": [
        "engine/core/engine_core.py",
        "engine/core/fault_record.py",
        "executor/failures.py",
        "executor/meeting.py",
        "executor/rank_activities.py",
        "executor/recovery.py",
        "processes/ping_watch.py",
        "scheduler/integrity.py",
        "scheduler/quarantine.py",
    ],
    "limits of time": ["scheduler/step_time/model.py"],
    "other stages": [
        "distributed/*link*.py",
        "distributed/*channel*.py",
        "worker/pipeline.py",
        "worker/token_inbox.py",
    ],
    "start": [
        "config/partition.py",
        "config/resolve.py",
        "engine/start/[!g]*.py",
        "executor/executor.py",
        "kernels/cpu/library.py",
        "model_loader/*",
        "worker/startup.py",
        "worker/worker.py",
    ],
    "log-probabilities": ["sample/logprobs.py"],
    "request parts": [
        "engine/request/answer_parts.py",
        "interface/parts.py",
        "interface/prompt_logprobs.py",
        "scheduler/request_parts.py",
        "worker/parts/*",
    ],
    "traces": ["engine/core/step_figures.py"],
}


def _load_script() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("path_script", str(SCRIPT))
    spec = importlib.util.spec_from_loader("path_script", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["path_script"] = module  # dataclasses look their module up
    loader.exec_module(module)
    return module


script = _load_script()


@pytest.fixture(scope="module")
def files() -> dict[str, dict[str, int]]:
    done = subprocess.run([sys.executable, SCRIPT, "--json"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    measured: dict[str, dict[str, int]] = json.loads(done.stdout)
    return measured


def test_the_path_of_a_token_grows_no_longer(files: dict[str, dict[str, int]]) -> None:
    for column, most in MOST.items():
        total = sum(counts[column] for counts in files.values())
        assert total <= most, f"the path has {total} in the column {column!r} of scripts/path: more than before"


def test_the_path_leads_from_the_prompt_to_the_token(files: dict[str, dict[str, int]]) -> None:
    steps = [
        "entrypoints/llm",
        "engine/core/step_loop",
        "scheduler/step_scheduler",
        "executor/step_protocol",
        "worker/step_pipeline",
    ]
    steps += ["models/decoder", "sample/sampler", "engine/request/output_processor"]
    assert {f"{each}.py" for each in steps} <= files.keys()
    assert all(0 < counts["ran"] <= counts["lines"] for counts in files.values())


def test_a_plain_prompt_enters_nothing_that_is_beside_the_path(files: dict[str, dict[str, int]]) -> None:
    patterns = [pattern for listed in BESIDE.values() for pattern in listed]
    assert [path for path in files if any(fnmatch(path, each) for each in patterns)] == []


def test_every_pattern_is_of_a_file() -> None:
    paths = [path.relative_to(script.PACKAGE).as_posix() for path in script.PACKAGE.rglob("*.py")]
    for pattern in [pattern for listed in BESIDE.values() for pattern in listed]:
        assert any(fnmatch(path, pattern) for path in paths), pattern


TEXT = '''"""A module.

More."""

# a comment
RATE = 1


@cache
def used(x):
    """One line."""
    # why

    return [
        y for y in x
    ]


def unused():
    return lambda: 1
'''


@pytest.mark.parametrize(
    ("first_lines", "ran"), [({9}, 8), ({9, 15}, 8), ({20}, 1), ({9, 19, 20}, 10), ({1}, None), (set(), None)]
)
def test_what_is_counted(first_lines: set[int], ran: int | None) -> None:
    """A decorator belongs to its function. Comprehensions are parts of their functions."""
    counts = script.count(TEXT, first_lines)
    assert counts == (None if ran is None else script.Counts(lines=20, code=8, size=4, ran=ran))


def test_the_table_has_a_line_for_each_room_and_each_file() -> None:
    files = {"timeline.py": script.Counts(5, 4, 6, 3), "engine/a.py": script.Counts(900, 80, 90, 7)}
    files["engine/b.py"] = script.Counts(200, 20, 30, 2)
    lines = [line.split() for line in script.table(files).splitlines()]
    assert lines == [
        ["lines", "code", "size", "ran"],
        ["(no", "room)", "5", "4", "6", "3"],
        ["timeline.py", "5", "4", "6", "3"],
        ["engine/", "1,100", "100", "120", "9"],
        ["a.py", "900", "80", "90", "7"],
        ["b.py", "200", "20", "30", "2"],
        ["3", "files", "1,105", "104", "126", "12"],
    ]
