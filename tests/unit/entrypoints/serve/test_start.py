"""Before the first answer: little is imported, and files may be open for all connections."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from inflight.entrypoints.serve.engine_start import ServedModel

HEAVY = ("torch", "fastapi", "starlette", "numpy", "tokenizers", "prometheus_client", "jinja2", "msgspec")


@pytest.mark.parametrize(
    "modules",
    [
        "inflight.entrypoints.cli.main, inflight.entrypoints.serve.command",
        "inflight.entrypoints.cli.main, inflight.entrypoints.serve.supervisor",
        "inflight.entrypoints.serve.front_end_main",
    ],
)
def test_nothing_heavy_is_imported_before_the_first_answer(modules: str) -> None:
    code = f"import sys, {modules}\n"
    code += f"print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "[]"


def test_as_many_files_may_be_open_as_connections_need() -> None:
    script = """
import resource
from inflight.entrypoints.serve.listener import Listener
from inflight.entrypoints.serve.settings import ServerSettings
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 512))
for max_connections in (100, 9000):
    Listener(ServerSettings(port=0, max_connections=max_connections)).close()
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "356 512\n512 512\n"
    assert "ulimit -Hn" in done.stderr


def test_what_serves_imports_no_torch() -> None:
    code = "import sys, inflight.entrypoints.serve.engine_start, inflight.entrypoints.http.app\n"
    code += "import inflight.entrypoints.serve.supervisor\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "False"


def test_the_end_closes_the_engine_and_then_sends_what_is_left_of_the_traces() -> None:
    closed: list[str] = []
    model = SimpleNamespace(max_model_len=1, num_kv_cache_tokens=1)

    async def close_engine() -> None:
        closed.append("engine")

    engine: Any = SimpleNamespace(model=model, close=close_engine)
    tracing: Any = SimpleNamespace(close=lambda: closed.append("tracing"))
    missing: Any = None
    asyncio.run(ServedModel("name", engine, missing, missing, tracing=tracing).close())
    assert closed == ["engine", "tracing"]
