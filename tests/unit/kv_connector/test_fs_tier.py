"""`FsTier`: files that appear whole or not at all, limits of bytes, and file systems that refuse."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from inflight.config.kv_tiers import KVTierConfig
from inflight.errors import ConfigError
from inflight.kv_connector.fs_tier import FsTier
from inflight.kv_connector.tier_stack import TierStack
from tests.support.waits import wait_until

pytestmark = pytest.mark.usefixtures("patient_breakers")

LENGTH = 3 * 4096
SHARD = "tp0of1-pp0of1"


def tier(folder: Path, max_bytes: int = 2**40, num_shards: int = 1, **more: Any) -> FsTier:
    return FsTier(KVTierConfig(path=str(folder), max_bytes=max_bytes, **more), SHARD, num_shards)


def stack(folder: Path, **more: Any) -> TierStack:
    config = KVTierConfig(path=str(folder), timeout_seconds=300, **more)
    return TierStack([config], root=b"r" * 32, shard=SHARD, num_shards=1, payload_bytes=LENGTH - 100)


def name(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def data(number: int) -> memoryview:
    found = memoryview(mmap.mmap(-1, LENGTH))
    found[:] = hashlib.shake_128(b"%d" % number).digest(LENGTH)
    return found


def numbers(folder: Path, most: int = 100) -> list[int]:
    """The objects that are there. Parts of the folder may be removed meanwhile."""
    there = {file for _, _, files in os.walk(folder) for file in files}
    return [number for number in range(most) if name(number).hex() in there]


def path_of(folder: Path, number: int) -> Path:
    return folder / SHARD / name(number)[:1].hex() / name(number).hex()


def use(folder: Path, number: int, seconds_ago: float) -> None:
    at = time.time() - seconds_ago
    os.utime(path_of(folder, number), (at, at))


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A tmpfs."""
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root can mount a tmpfs, and some containers cannot")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_where_objects_are(tmp_path: Path) -> None:
    one = tier(tmp_path)
    one.put(name(1), data(1))
    assert path_of(tmp_path, 1).read_bytes() == data(1)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [path_of(tmp_path, 1)]
    assert path_of(tmp_path, 1).stat().st_mode & 0o777 == 0o600  # they tell prompts
    assert path_of(tmp_path, 1).parent.stat().st_mode & 0o777 == 0o700
    one.close()


def test_buffered_where_direct_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, refused = os.open, []

    def refuse(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        if flags & os.O_DIRECT:
            os.close(real(path, flags & ~os.O_DIRECT, mode, **more))  # Linux makes the file before it refuses
            refused.append(path)
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return real(path, flags, mode, **more)

    monkeypatch.setattr(os, "open", refuse)
    one = tier(tmp_path)
    for number in range(3):
        one.put(name(number), data(number))
    into = memoryview(mmap.mmap(-1, LENGTH))
    assert one.get(name(2), into) == LENGTH and into == data(2)
    assert len(refused) == 1
    one.close()


def test_partial_writes_and_reads_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in ("preadv", "pwritev"):
        real = getattr(os, call)
        monkeypatch.setattr(os, call, lambda file, b, offset, real=real: real(file, [b[0][:4096]], offset))
    one = tier(tmp_path)
    one.put(name(1), data(1))
    into = memoryview(mmap.mmap(-1, 2 * LENGTH))
    assert one.get(name(1), into) == LENGTH and into[:LENGTH] == data(1)
    one.close()


def test_least_recently_used_go_first(tmp_path: Path) -> None:
    one = tier(tmp_path, 10 * LENGTH)
    for number in range(10):
        one.put(name(number), data(number))
        use(tmp_path, number, 1000 - number)
    one._room.list_objects()
    assert numbers(tmp_path) == list(range(10))
    one.get(name(0), data(0))  # used again
    for number in (10, 11):
        one.put(name(number), data(number))
    assert numbers(tmp_path) == [0, *range(3, 12)]
    one.close()


def test_a_hit_is_noted_once_a_minute(tmp_path: Path) -> None:
    one = tier(tmp_path)
    one.put(name(1), data(1))
    for seconds_ago, is_noted in ((30.0, False), (90.0, True)):
        use(tmp_path, 1, seconds_ago)
        before = path_of(tmp_path, 1).stat().st_mtime
        one.get(name(1), data(0))
        assert (path_of(tmp_path, 1).stat().st_mtime > before) is is_noted
    one.close()


def test_written_bytes_are_bounded_at_every_moment(tmp_path: Path) -> None:
    one = tier(tmp_path, 64 * LENGTH, num_shards=2)
    for number in range(100):
        one.put(name(number), data(number))
        assert len(numbers(tmp_path)) <= 32
        if number == 31:
            one._room.list_objects()
    wait_until(lambda: one._room._oldest)
    one.put(name(100), data(100))
    assert path_of(tmp_path, 100).exists()
    one.close()


def test_a_restart_finds_the_objects_and_their_bytes(tmp_path: Path) -> None:
    one = tier(tmp_path)
    for number in range(20):
        one.put(name(number), data(number))
        use(tmp_path, number, 1000 - number)
    one.close()
    two = tier(tmp_path, 10 * LENGTH)
    wait_until(lambda: numbers(tmp_path) == list(range(10, 20)))
    wait_until(lambda: two._room.num_bytes == 10 * LENGTH)
    two.close()


def test_the_default_limit_is_half_of_what_is_free_and_stays_after_a_restart(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=2m") as folder:
        one = tier(folder, 0, num_shards=2)
        wait_until(lambda: one._room.max_bytes)
        assert 0.45 * 2**20 < one._room.max_bytes <= 0.5 * 2**20
        for number in range(30):
            one.put(name(number), data(number))
        one.close()
        two = tier(folder, 0, num_shards=2)
        wait_until(lambda: two._room.max_bytes)
        assert two._room.max_bytes > 0.45 * 2**20
        two.close()


def test_left_over_and_foreign_files(tmp_path: Path) -> None:
    one = tier(tmp_path, 4 * LENGTH, timeout_seconds=2.0)
    one.put(name(1), data(1))
    one.close()
    folder = path_of(tmp_path, 1).parent
    foreign = [
        tmp_path / "readme.txt",
        tmp_path / SHARD / "note",
        folder / "photo.jpg",
        folder / f"{name(1).hex()}.bak",
        folder / f"{name(1).hex()}.0123.tmp",
        tmp_path / SHARD / "zz" / name(1).hex(),
    ]
    old, new = (folder / f"{name(2).hex()}.{c * 16}.tmp" for c in "ab")
    for path in (*foreign, old, new):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(10 * LENGTH))
    inner = folder / ("f" * 64)
    inner.mkdir()
    link = tmp_path / SHARD / "ee" / ("e" * 64)
    link.parent.mkdir()
    link.symlink_to(foreign[0])
    os.utime(old, (time.time() - 21, time.time() - 21))
    two = tier(tmp_path, 4 * LENGTH, timeout_seconds=2.0)
    wait_until(lambda: not old.exists())
    two._room.list_objects()
    assert new.exists() and all(path.exists() for path in foreign) and inner.is_dir() and link.is_symlink()
    assert numbers(tmp_path) == [1]
    with pytest.raises(OSError, match="symbolic links"):
        two.get(bytes.fromhex("e" * 64), data(0))  # no link leads out of the folder
    two.close()


WRITER = """
import mmap, os, sys
from inflight.config.kv_tiers import KVTierConfig
from inflight.kv_connector.tier_stack import TierStack
real = os.pwritev
def torn(file, buffers, offset):
    done = real(file, [buffers[0][:4096]], offset)
    print("torn", flush=True)
    sys.stdin.read()
os.pwritev = torn
config = KVTierConfig(path=sys.argv[1], timeout_seconds=300)
tiers = TierStack([config], root=b"r" * 32, shard=sys.argv[2], num_shards=1, payload_bytes=int(sys.argv[3]))
tiers.store([b"k" * 33], [memoryview(b"x" * int(sys.argv[3]))])
"""


def test_a_writer_that_is_killed_leaves_no_half_object(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path), SHARD, str(LENGTH - 100)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"torn\n"
        writer.send_signal(signal.SIGKILL)
    (left,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert left.suffix == ".tmp"
    os.utime(left, (time.time() - 4000, time.time() - 4000))
    tiers = stack(tmp_path)
    assert tiers.fetch([b"k" * 33])[0] is None
    wait_until(lambda: not left.exists())
    assert tiers.store([b"k" * 33], [memoryview(b"x" * (LENGTH - 100))])
    found = tiers.fetch([b"k" * 33])[0]
    assert found is not None and found[0] == b"x" * (LENGTH - 100)
    assert tiers.take_counts()["fs"]["checksum_failures"] == 0
    tiers.close()


@pytest.mark.parametrize("options", ["size=96k", "nr_inodes=20"])
def test_a_full_disk_has_the_newest_objects(tmp_path: Path, options: str) -> None:
    """Its bytes or its inodes are used up, though `max_bytes` is not."""
    with mounted(tmp_path / "disk", options) as folder:
        one = tier(folder, 2**30)
        for number in range(60):
            one.put(name(number), data(number))
            if number % 2:
                one._room.list_objects()
        left = numbers(folder)
        assert len(left) >= 2 and max(left) == 59
        assert not list(folder.rglob("*.tmp"))
        one.close()


def test_a_disk_that_others_have_filled(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=64k") as folder:
        (folder / "others").write_bytes(bytes(48 << 10))
        tiers = stack(folder, max_bytes=2**30)
        stored = [tiers.store([b"%33d" % n], [memoryview(b"%x" % n * 5000)]) for n in range(12)]
        counts = tiers.take_counts()["fs"]
        assert counts["stored"] + counts["errors"] + counts["rejected"] == 12
        assert not list(folder.rglob("*.tmp"))
        for n in range(12):  # reads have a breaker of their own; what is there is whole
            found = tiers.fetch([b"%33d" % n])[0]
            assert found is None or (found[0] == b"%x" % n * 5000 and stored[n])
        tiers.close()


def test_a_folder_that_can_only_be_read(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=1m") as folder:
        tiers = stack(folder)
        assert tiers.store([b"k" * 33], [memoryview(b"text")])
        tiers.close()
        (path,) = [path for path in folder.rglob("*") if path.is_file()]
        os.utime(path, (0, 0))
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        tiers = stack(folder)
        found = tiers.fetch([b"k" * 33])[0]
        assert found is not None and found[0] == b"text"
        assert not tiers.store([b"l" * 33], [memoryview(b"text")])
        assert tiers.take_counts()["fs"]["errors"] == 1
        tiers.close()
        with pytest.raises(ConfigError, match=r"'.*new' cannot be made"):
            FsTier(KVTierConfig(path=str(folder)), "new", 1)


def test_a_folder_that_is_removed_comes_back(tmp_path: Path) -> None:
    import shutil

    tiers = stack(tmp_path / "kv", max_bytes=2**30)
    assert tiers.store([b"k" * 33], [memoryview(b"text")])
    shutil.rmtree(tmp_path / "kv")
    assert tiers.fetch([b"k" * 33])[0] is None
    assert tiers.store([b"k" * 33], [memoryview(b"text")])
    found = tiers.fetch([b"k" * 33])[0]
    assert found is not None and found[0] == b"text"
    tiers.close()


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="Not a directory"):
        tier(tmp_path / "file")


# -- what nearer places have -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clock", [0.0, -3e7, 3e7])
def test_objects_that_are_used_in_nearer_places_are_the_last_to_be_deleted(tmp_path: Path, clock: float) -> None:
    """Whatever the clock was when they were stored: right, behind or ahead."""
    made = tier(tmp_path, max_bytes=8 * LENGTH)
    made.put(name(0), data(0))
    use(tmp_path, 0, 1000.0 + clock)
    for number in range(1, 20):
        made.put(name(number), data(number))
        assert made.touch(name(0))
        made._room.list_objects()
    assert 0 in numbers(tmp_path) and len(numbers(tmp_path)) <= 8
    made.close()
    again = tier(tmp_path, max_bytes=8 * LENGTH)
    assert again.get(name(0), data(1)) == LENGTH
    assert not again.touch(name(1)), "it was deleted"
    again.close()


@pytest.mark.parametrize("kind", ["folder", "no permission"])
def test_an_object_that_cannot_be_read_is_stored_again(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers, path = stack(tmp_path), path_of(tmp_path, 0)
    key, payload = b"k" * 33, memoryview(b"p" * (LENGTH - 100))
    assert tiers.store([key], [payload])
    (path,) = [each for each in tmp_path.rglob("*") if each.is_file()]
    path.unlink()
    if kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(b"unread")
        real = os.open

        def refuse(given: Any, *rest: Any, **more: Any) -> int:  # as for a user who is not root
            if given == str(path) and path.read_bytes() == b"unread" and path.exists():
                raise PermissionError(errno.EACCES, "Permission denied")
            return real(given, *rest, **more)

        monkeypatch.setattr(os, "open", refuse)
    assert tiers.fetch([key])[0] is None
    monkeypatch.undo()
    assert not path.exists()
    assert tiers.store([key], [payload]) and tiers.fetch([key])[0] is not None
    tiers.close()
