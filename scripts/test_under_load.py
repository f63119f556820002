"""Run the tests that depend on time again and again, with a busy process on each core.

    .venv/bin/python scripts/test_under_load.py [COUNT]        20 times without COUNT

These tests are found by their source: they compare times, wait with a limit, or count what threads and other processes change
meanwhile, such as descriptors. Exit code 1 if one of them has failed; the last line names it, and says how often.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("tests/unit", "tests/benchmarks", "tests/conformance", "tests/e2e", "tests/inflight_bench")
SLOW = ("test_faults", "test_soak", "test_schemathesis", "test_faults_network")  # minutes each; `make test` has them
_TIMED = re.compile(
    r"assert .*(monotonic|perf_counter|seconds)\S* .*<|(result|exception|communicate|wait)\((timeout=)?\d+\)|have_ended\("
    r"|(num_descriptors|open_descriptors|threading\.enumerate|active_count|children|descendants)\("
)


def timed_tests() -> Iterator[str]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("test_*.py")):
            if path.stem in SLOW:
                continue
            text = path.read_text(encoding="utf-8")
            functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
            for function in functions:
                if function.name.startswith("test_") and _TIMED.search(ast.get_source_segment(text, function) or ""):
                    yield f"{path.relative_to(ROOT)}::{function.name}"


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    tests = list(timed_tests())
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    failed: Counter[str] = Counter()
    try:
        for number in range(1, count + 1):
            start = time.monotonic()
            command = [sys.executable, "-m", "pytest", "-q", "-n", "4", "--dist", "worksteal", *tests]
            done = subprocess.run(
                command,
                cwd=ROOT,
                capture_output=True,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "300"},
            )
            failures = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
            failed.update(failures)
            last = next((line for line in reversed(done.stdout.splitlines()) if line.strip()), "")
            sys.stdout.write(f"run {number} of {count}, {time.monotonic() - start:.0f} s: {last.strip('= ')}\n")
            if failures:
                sys.stdout.write(done.stdout)
            sys.stdout.flush()
    finally:
        for process in busy:
            process.kill()
    sys.stdout.write(
        f"{len(tests)} test functions, {count} runs, {sum(failed.values())} failures {dict(failed) or ''}\n"
    )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
