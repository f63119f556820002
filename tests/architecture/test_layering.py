"""A room imports only from lower ranks: the table in rooms.py against every import in `inflight/`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.rooms import GATES, LOWER_RANKS, PUBLIC_API, ROOMS, may_import
from tests.architecture.source import PACKAGE, ROOT, Package, room_of, write_package


def layering_problems(package: Package) -> list[str]:
    found = []
    for file in package.files:
        if file.room == "":
            continue  # the public API may name everything; that it is lazy is tested in test_torch_free.py
        if file.room not in ROOMS:
            found.append(f"{file.path}: the room {file.room!r} is not in tests/architecture/rooms.py")
            continue
        for imported in package.imports(file):
            if imported.top != PACKAGE:
                continue
            room = room_of(imported.module) or PUBLIC_API
            where = f"{file.path}:{imported.line}"
            if room != PUBLIC_API and room not in ROOMS:
                found.append(f"{where}: imports {imported.module}, and the room {room!r} is not in rooms.py")
            elif not may_import(file.room, room):
                found.append(f"{where}: {file.room} must not import {room} ({imported.module})")
            elif room != file.room and room in GATES and file.path not in GATES[room]:
                found.append(f"{where}: only {', '.join(sorted(GATES[room]))} may import {room}")
    return found


def test_every_import_obeys_the_table() -> None:
    assert layering_problems(Package(ROOT / PACKAGE)) == []


def test_entrypoints_know_schedules_and_grammars_through_the_engine_only() -> None:
    package = Package(ROOT / PACKAGE)
    imported = {
        (file.path, each.module)
        for file in package.files
        if file.room == "entrypoints"
        for each in package.imports(file)
    }
    assert [each for each in imported if room_of(each[1]) in {"scheduler", "structured_output"}] == []


def test_the_table_is_consistent() -> None:
    for room in ROOMS.values():
        assert room.rank in LOWER_RANKS
        for other in room.same_rank - {PUBLIC_API}:
            assert ROOMS[other].rank == room.rank, f"{room.name} names {other}, which is of another rank"
    seen: set[str] = set()
    for room in ROOMS.values():  # a room names only rooms above its own line, so there is no cycle
        assert room.same_rank - {PUBLIC_API} <= seen, f"{room.name} names a room that stands below it"
        seen.add(room.name)
    assert not may_import("scheduler", "worker")
    assert not may_import("worker", "scheduler")
    assert set(GATES) <= set(ROOMS)


@pytest.mark.parametrize(
    ("path", "text", "problem"),
    [
        ("errors.py", "import inflight.config.engine", "errors must not import config"),
        ("bench_serve/run.py", "from inflight.engine.core import EngineCore", "bench_serve must not import engine"),
        ("scheduler/queue.py", "from inflight.worker.worker import Worker", "scheduler must not import worker"),
        ("worker/runner.py", "from inflight.kv_cache import BlockPool", "worker must not import kv_cache"),
        ("layers/linear.py", "def f():\n    from inflight.models import llama", "layers must not import models"),
        (
            "config/engine.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import inflight.engine.core",
            "config must not import engine",
        ),
        ("kv_cache/pool.py", "from .. import engine", "kv_cache must not import engine"),
        ("interface/step.py", "from ..engine.core import EngineCore", "interface must not import engine"),
        ("scheduler/__init__.py", "from ..engine import core", "scheduler must not import engine"),
        (
            "device/cpu.py",
            "import importlib\nworker = importlib.import_module('inflight.worker.worker')",
            "device must not import worker",
        ),
        ("executor/multiproc.py", "from inflight.worker.worker import Worker", "may import worker"),
        ("engine/core.py", "from inflight import LLM", "engine must not import (api)"),
        ("helpers/strings.py", "", "the room 'helpers' is not in"),
        ("engine/core.py", "import inflight.helpers", "the room 'helpers' is not in"),
    ],
)
def test_a_violation_is_found(tmp_path: Path, path: str, text: str, problem: str) -> None:
    package = write_package(tmp_path, {"engine/__init__.py": "", "engine/core.py": "", path: text})
    found = layering_problems(package)
    assert len(found) == 1
    assert problem in found[0]
    assert path in found[0]


def test_what_the_table_allows_passes(tmp_path: Path) -> None:
    files = {
        "__init__.py": "def __getattr__(name):\n    import inflight.entrypoints.llm",
        "errors.py": "import os\nimport torch",
        "scheduler/queue.py": "from inflight import errors\nfrom inflight.kv_cache import Block\nfrom . import request",
        "scheduler/request.py": "from .queue import Queue",
        "executor/uniproc.py": "from inflight.worker.worker import Worker",
        "worker/worker.py": "from inflight.worker import runner\nimport inflight.attention.sdpa",
        "entrypoints/cli.py": "from inflight import LLM",
    }
    assert layering_problems(write_package(tmp_path, files)) == []
