"""`FolderRoom`: bytes are counted in memory, and the oldest objects go first."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inflight.kv_connector import folder_room
from inflight.kv_connector.folder_room import FolderRoom
from tests.support.waits import wait_until

SIZE = 100


def name(number: int) -> str:
    return hashlib.sha256(b"%d" % number).hexdigest()


def write(folder: Path, number: int, seconds_ago: float = 0.0, end: str = "") -> Path:
    path = folder / name(number)[:2] / (name(number) + end)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(bytes(SIZE))
    at = time.time() - seconds_ago
    os.utime(path, (at, at))
    return path


def place(room: FolderRoom, folder: Path, number: int, seconds_ago: float = 0.0) -> None:
    """Store an object, as a tier does."""
    temporary = write(folder, number, seconds_ago, f".{'a' * 16}.tmp")
    room.place(str(temporary), str(temporary)[:-21], SIZE)


def left(folder: Path, most: int = 200) -> list[int]:
    there = {path.name for path in folder.rglob("*")}
    return [number for number in range(most) if name(number) in there]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Any]:
    rooms: list[FolderRoom] = []

    def make(max_bytes: int) -> FolderRoom:
        rooms.append(FolderRoom(str(tmp_path), max_bytes, 1, 10.0))
        rooms[-1].list_objects()
        return rooms[-1]

    yield make
    for each in rooms:
        each.close()


def test_many_stores_list_the_folder_a_few_times(tmp_path: Path, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, each sixteenth of the limit was a listing."""
    for number in range(100):
        write(tmp_path, number, 1000 - number)
    room = made(200 * SIZE)
    listings: list[int] = []
    real = room._objects_of

    def noted(part: int, now: float) -> Any:
        listings.append(part)
        return real(part, now)

    monkeypatch.setattr(room, "_objects_of", noted)
    for number in range(40):
        assert room.reserve(SIZE)
        place(room, tmp_path, 100 + number)
    assert not listings and room.num_bytes == 140 * SIZE


def test_the_limit_holds_at_every_moment(tmp_path: Path, made: Any) -> None:
    for number in range(10):
        write(tmp_path, number, 1000 - number)
    room = made(10 * SIZE)
    for number in range(10, 17):
        assert room.reserve(SIZE)
        place(room, tmp_path, number)
        assert len(left(tmp_path)) == 10 and room.num_bytes == 10 * SIZE
    assert left(tmp_path) == list(range(7, 17))
    assert not room.reserve(11 * SIZE), "no object is larger than the limit"
    assert len(left(tmp_path)) == 10, "nothing was deleted for it"


def test_what_was_used_since_the_listing_stays(tmp_path: Path, made: Any) -> None:
    paths = [write(tmp_path, number, 1000 - number) for number in range(4)]
    room = made(4 * SIZE)
    os.utime(paths[0])
    assert room.reserve(SIZE)
    assert left(tmp_path) == [0, 2, 3]


def test_what_another_engine_has_deleted_is_room(tmp_path: Path, made: Any) -> None:
    paths = [write(tmp_path, number, 1000 - number) for number in range(4)]
    room = made(4 * SIZE)
    paths[0].unlink()
    assert room.reserve(SIZE) and left(tmp_path) == [1, 2, 3]


def test_without_a_candidate_nothing_is_stored_until_the_folder_is_listed(tmp_path: Path, made: Any) -> None:
    room = made(2 * SIZE)
    for number in range(2):
        assert room.reserve(SIZE)
        place(room, tmp_path, number, 100 - number)
    with room._listing:
        room._oldest.clear()
        assert not room.reserve(SIZE)
        assert left(tmp_path) == [0, 1]
    wait_until(lambda: room.reserve(SIZE))
    assert left(tmp_path) == [1]


def test_a_full_disk_deletes_the_oldest(tmp_path: Path, made: Any) -> None:
    for number in range(5):
        write(tmp_path, number, 1000 - number)
    room = made(2**30)
    assert room.free(2 * SIZE) and left(tmp_path) == [2, 3, 4]
    assert room.free(4 * SIZE) and left(tmp_path) == []
    assert not room.free(SIZE)


def test_objects_stored_and_deleted_during_a_listing_count_once(
    tmp_path: Path, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        write(tmp_path, number, 1000 - number)
    room = made(2**30)
    pauses: list[float] = []

    def during(seconds: float) -> bool:
        """Called between two parts."""
        pauses.append(seconds)
        if len(pauses) == 128:
            for number in range(30, 34):
                place(room, tmp_path, number)
            room.free(5 * SIZE)
        return False

    closed = SimpleNamespace(wait=during, is_set=lambda: False, set=room._is_closed.set)
    with monkeypatch.context() as patched:
        patched.setattr(room, "_is_closed", closed)
        room.list_objects()
    assert room.num_bytes == 19 * SIZE == len(left(tmp_path)) * SIZE
    assert not {name(number) for number in range(5)} & {Path(each.path).name for each in room._oldest}
    place(room, tmp_path, 33)  # another writer was faster
    assert room.num_bytes == 19 * SIZE


def test_times_in_the_future_count_as_now(tmp_path: Path, made: Any) -> None:
    """A clock that was ahead once does not keep these objects for ever."""
    write(tmp_path, 0, -10_000.0)
    write(tmp_path, 1, 50.0)
    room = made(3 * SIZE)
    write(tmp_path, 2, -5.0)  # now they are newer than what comes from the future
    room.list_objects()
    assert Path(room._oldest[-1].path).name == name(1)
    assert all(path.stat().st_mtime < time.time() + 1 for path in tmp_path.rglob("*") if path.is_file())


def test_only_the_oldest_are_kept_in_memory(tmp_path: Path, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_room, "_MAX_OLDEST", 3)
    for number in range(9):
        write(tmp_path, number, 1000 - number)
    room = made(9 * SIZE)
    assert len(room._oldest) == 3 and room.num_bytes == 9 * SIZE
    for _ in range(6):
        wait_until(lambda: room._oldest)
        room.free(SIZE)
    assert left(tmp_path) == [6, 7, 8]
