"""A room imports only from lower ranks: the table in rooms.py against every import in `inflight/`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.rooms import GATES, INNER, LOWER_RANKS, PUBLIC_API, ROOMS, may_import
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
            elif room == file.room and room in INNER:
                mine, other = inner_room(file.module), inner_room(imported.module)
                if other not in INNER[room].get(mine, frozenset()) | {mine}:
                    found.append(f"{where}: {room}/{mine} must not import {room}/{other} ({imported.module})")
    return found


def inner_room(module: str) -> str:
    """The second folder of a module: "core" for "inflight.engine.core.step_loop"; "" if there is none."""
    return ".".join(module.split(".")[2:3])


def test_every_import_obeys_the_table() -> None:
    assert layering_problems(Package(ROOT / PACKAGE)) == []


# Files that import each other, for a reason. Such a circle is read as one file.
CIRCLES = {
    # the executor calls `recover`, whose argument is the executor; its rules need a file of their own
    # the two halves of one check at the start
    frozenset({"models/transformers_fallback/model.py", "models/transformers_fallback/self_check.py"}),
    # a kernel for the processor and one for the GPU, each in a file that only its machine loads
    frozenset({"kernels/token_masks.py", "kernels/triton/token_masks.py"}),
    # one file makes what the other one defines, and the other one names a type of the first in its signatures
    frozenset({"tokenizer/tokenizer.py", "tokenizer/window_decoder.py"}),
    frozenset({"structured_output/spec.py", "structured_output/structural_tag.py"}),
}


def circles(package: Package) -> set[frozenset[str]]:
    """The groups of files each of which imports the others, directly or through each other, at any time."""
    paths = {file.module: file.path for file in package.files}
    imported = {
        file.path: {paths[each.module] for each in package.imports(file) if each.module in paths} - {file.path}
        for file in package.files
    }
    reached = {path: set(others) for path, others in imported.items()}
    for path in reached:  # Warshall's transitive closure
        for others in reached.values():
            if path in others:
                others |= reached[path]
    return {
        frozenset(other for other in others if path in reached[other])
        for path, others in reached.items()
        if path in others
    }


def test_no_circle_of_files_but_those_with_a_reason(tmp_path: Path) -> None:
    assert circles(Package(ROOT / PACKAGE)) == CIRCLES
    three = {
        "a/b.py": "import inflight.a.c",
        "a/c.py": "def f():\n    import inflight.d",
        "d.py": "from inflight.a import b",
    }
    assert circles(write_package(tmp_path, three)) == {frozenset(three)}


def test_a_room_with_inner_rooms_has_no_other_files_and_no_circle() -> None:
    package = Package(ROOT / PACKAGE)
    for room, inner in INNER.items():
        assert {inner_room(file.module) for file in package.files if file.room == room} == {"", *inner}
        seen: set[str] = set()
        while ready := {name for name, others in inner.items() if name not in seen and others <= seen}:
            seen |= ready
        assert seen == set(inner)


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
        ("scheduler/queue.py", "from inflight.worker.worker import Worker", "scheduler must not import worker"),
        ("worker/runner.py", "from inflight.kv_cache import BlockPool", "worker must not import kv_cache"),
        ("layers/linear.py", "def f():\n    from inflight.models import llama", "layers must not import models"),
        (
            "config/engine.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import inflight.engine.core.engine_core",
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
        ("engine/core/engine_core.py", "from inflight import LLM", "engine must not import (api)"),
        ("helpers/strings.py", "", "the room 'helpers' is not in"),
        ("engine/core/engine_core.py", "import inflight.helpers", "the room 'helpers' is not in"),
        (
            "engine/core/step_loop.py",
            "from inflight.engine.start import make_core",
            "engine/core must not import engine/start",
        ),
        ("engine/process/outbox.py", "from ..request import prompt", "engine/process must not import engine/request"),
    ],
)
def test_a_violation_is_found(tmp_path: Path, path: str, text: str, problem: str) -> None:
    package = write_package(tmp_path, {"engine/__init__.py": "", "engine/core/engine_core.py": "", path: text})
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
