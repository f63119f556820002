"""`tests/unit/` mirrors `inflight/`: a folder there is a room here."""

from __future__ import annotations

from pathlib import Path

from tests.architecture.source import PACKAGE, ROOT, Package, write_package


def mirror_problems(package: Package, unit: Path) -> list[str]:
    folders = sorted(path.name for path in unit.iterdir() if path.is_dir()) if unit.is_dir() else []
    return [
        f"tests/unit/{name} is about no room of {PACKAGE}/"
        for name in folders
        if name != "__pycache__" and name not in package.rooms
    ]


def test_every_folder_of_unit_tests_is_a_room() -> None:
    assert mirror_problems(Package(ROOT / PACKAGE), ROOT / "tests" / "unit") == []


def test_a_folder_without_a_room_is_found(tmp_path: Path) -> None:
    package = write_package(tmp_path, {"hub.py": "", "engine/core/engine_core.py": ""})
    for name in ("hub", "engine", "__pycache__"):
        (tmp_path / "unit" / name).mkdir(parents=True)
    assert mirror_problems(package, tmp_path / "unit") == []
    (tmp_path / "unit" / "scheduler").mkdir()
    assert mirror_problems(package, tmp_path / "unit") == ["tests/unit/scheduler is about no room of inflight/"]
