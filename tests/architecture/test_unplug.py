"""An edge is unplugged by deleting its files and its row in a table: nothing else knows it. That the engine runs without it is
tested in tests/e2e/test_unplugged_edges.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.edges import (
    Edge,
    all_edges,
    copy_without,
    importers_of,
    strangers,
    with_dependents,
    without_rows,
)
from tests.architecture.source import PACKAGE, ROOT, Package, write_package


@pytest.fixture(scope="module")
def importers() -> dict[str, set[str]]:
    return importers_of(Package(ROOT / PACKAGE))


@pytest.mark.parametrize("edge", all_edges(), ids=str)
def test_only_a_table_knows_an_edge(edge: Edge, importers: dict[str, set[str]]) -> None:
    whole = with_dependents(edge, all_edges(), importers)
    assert strangers(whole, importers) == set()
    for table in whole.tables:
        without_rows((ROOT / PACKAGE / table).read_text(encoding="utf-8"), whole)


TABLE = """
from inflight.tiers.fs import FsTier
from inflight.tiers.obj import ObjTier
import inflight.tiers.other

NAMES = "fs obj".split()
KINDS = {"fs": FsTier, "obj": ObjTier, 3: ("fs", 4), 4: ("obj", 5), "by name": "inflight.tiers.fs:FsTier"}

class FsReader:
    made: FsTier

class ObjReader:
    pass

READERS = (FsReader, ObjReader)
"""
WITHOUT_FS = """
from inflight.tiers.obj import ObjTier
import inflight.tiers.other
NAMES = 'obj'.split()
KINDS = {'obj': ObjTier, 4: ('obj', 5)}

class ObjReader:
    pass
READERS = (ObjReader,)
"""


def fs_tier(*tables: str) -> Edge:
    return Edge("tier", "fs", frozenset({"tiers/fs.py"}), frozenset(tables), frozenset({"fs"}))


def test_rows_are_removed() -> None:
    assert without_rows(TABLE, fs_tier()) == WITHOUT_FS.strip()
    with pytest.raises(ValueError, match="no row of the tier fs"):
        without_rows(WITHOUT_FS, fs_tier())


def test_a_file_that_knows_an_edge_is_found(tmp_path: Path) -> None:
    files = {
        "tiers/fs.py": "",
        "tiers/faster_fs.py": "from inflight.tiers.fs import FsTier",
        "tiers/table.py": TABLE,
        "engine.py": "def f():\n    import inflight.tiers.fs",
        "worker.py": "from inflight.tiers.faster_fs import FasterFsTier",
    }
    importers = importers_of(write_package(tmp_path, files))
    edge = fs_tier("tiers/table.py")
    assert strangers(edge, importers) == {"tiers/faster_fs.py", "engine.py"}
    faster = Edge("tier", "faster", frozenset({"tiers/faster_fs.py"}), frozenset({"tiers/table.py"}))
    whole = with_dependents(edge, [edge, faster], importers)
    assert whole.files == {"tiers/fs.py", "tiers/faster_fs.py"}
    assert strangers(whole, importers) == {"engine.py", "worker.py"}


def test_the_copy_has_all_but_the_edge(tmp_path: Path) -> None:
    files = {
        "tiers/fs.py": "",
        "tiers/table.py": "KINDS = {'fs': 1, 'obj': 2}",
        "a/b/api.py": "",
        "a/__init__.py": "",
        "engine.py": "",
    }
    write_package(tmp_path, files)
    api = Edge("API", "b", frozenset({"a/b/"}), frozenset())
    copy = tmp_path / "copy"
    copy_without([fs_tier("tiers/table.py"), api], tmp_path / PACKAGE, copy)
    assert {path.relative_to(copy).as_posix() for path in copy.rglob("*.py")} == {
        "tiers/table.py",
        "a/__init__.py",
        "engine.py",
    }
    assert (copy / "tiers/table.py").read_text() == "KINDS = {'obj': 2}"
    assert (tmp_path / PACKAGE / "tiers/table.py").read_text() == files["tiers/table.py"]
