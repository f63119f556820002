"""The first answer comes soon: what is imported before the socket is bound is small."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "fastapi", "starlette", "numpy", "tokenizers", "prometheus_client")


def test_nothing_heavy_is_imported_before_the_first_answer() -> None:
    code = "import sys, inflight.entrypoints.cli.main, inflight.entrypoints.serve.command\n"
    code += f"print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
