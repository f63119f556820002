"""How large the core is and how dense the code: limits that may only fall. `scripts/core.py` prints what is counted."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch

import pytest

from scripts.core import core_of, measure
from scripts.source_size import SourceSize
from tests.architecture.core_rooms import CORE, EDGES, kind_of
from tests.architecture.rooms import ROOMS
from tests.architecture.source import PACKAGE, ROOT, Package

# These three numbers may only fall. The goals are 21,000, 5.2 and 8, of which the first and the third are reached.
MOST_CORE_SIZE = 21_000
MOST_NODES_A_LINE = 5.52
MOST_TUPLE_ASSIGNMENTS_IN_1000_LINES = 6.0


@pytest.fixture(scope="module")
def files() -> dict[str, SourceSize]:
    return measure(Package(ROOT / PACKAGE))


def test_the_core_grows_no_larger(files: dict[str, SourceSize]) -> None:
    size = core_of(files).size
    assert size <= MOST_CORE_SIZE, (
        f"the core has a size of {size:,}, {size - MOST_CORE_SIZE:,} above its limit. What a plain decoder does not need "
        "is an edge: give it files of its own, and add them to EDGES in tests/architecture/core_rooms.py"
    )


@pytest.mark.parametrize(
    ("density", "limit"),
    [
        (lambda size: size.nodes_a_line, MOST_NODES_A_LINE),
        (lambda size: size.tuple_assignments_in_1000_lines, MOST_TUPLE_ASSIGNMENTS_IN_1000_LINES),
    ],
    ids=["nodes in a line", "tuple assignments in 1,000 lines"],
)
def test_the_code_gets_no_denser(
    files: dict[str, SourceSize], density: Callable[[SourceSize], float], limit: float
) -> None:
    found = density(SourceSize.sum(files.values()))
    assert found <= limit, (
        f"{found:.2f} in inflight/, and the limit is {limit}. Give parts of long expressions a name, and assign values "
        "that have nothing to do with each other one by one (`scripts/core.py --densest` shows where)"
    )


def test_every_name_in_the_table_is_of_a_file_or_room(files: dict[str, SourceSize]) -> None:
    rooms = [each for each in CORE if "/" not in each]
    patterns = [each for each in CORE if "/" in each] + [each for listed in EDGES.values() for each in listed]
    assert set(rooms) <= ROOMS.keys() and len(set(rooms)) == len(rooms)
    assert [each for each in patterns if not any(fnmatch(path, each) for path in files)] == []


def test_an_edge_is_in_a_room_of_the_core() -> None:
    """Files of other rooms are edges without being named."""
    assert {each.split("/")[0] for listed in EDGES.values() for each in listed} <= set(CORE)


def test_where_files_belong() -> None:
    core = (
        "scheduler/scheduler.py",
        "engine/core/step_loop.py",
        "models/decoder.py",
        "errors.py",
        "entrypoints/llm.py",
    )
    assert [kind_of(path) for path in core] == [""] * len(core)
    assert kind_of("kernels/triton/linear.py") == kind_of("worker/gpu/staging.py") == "GPUs"
    assert kind_of("config/families/qwen3.py") == "model families"
    assert kind_of("parsers/repair.py") == "parsers" and kind_of("entrypoints/cli/bench.py") == "entrypoints"
    assert kind_of("hub.py") == "hub"
