"""What is compared of a model's files before their packed weights are used."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from inflight.weight_cache import identity
from inflight.weight_cache.identity import key_of, read_identities, sample_places


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(os.urandom(1 << 20))
    return path


def test_a_change_of_the_contents_is_another_key(file: Path) -> None:
    before = file.stat()
    first = key_of(read_identities([file]))
    assert key_of(read_identities([file])) == first
    content = bytearray(file.read_bytes())
    content[500_000] ^= 1  # at no sampled place
    with file.open("r+b") as opened:
        opened.write(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert key_of(read_identities([file])) != first
    assert key_of(read_identities([file]), "int8") != key_of(read_identities([file]))


def test_samples_are_compared_where_a_file_system_says_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "identity_of", lambda _: identity.FileIdentity(1 << 20, 0, 0, 0))
    first = read_identities([file])
    for offset in (0, 70_000, (1 << 20) - 1):
        content = bytearray(file.read_bytes())
        content[offset] ^= 1
        file.write_bytes(content)
        assert (read_identities([file]).sampled == first.sampled) == (offset == 70_000 and not _is_sampled(offset))


def _is_sampled(offset: int) -> bool:
    return any(start <= offset < start + size for start, size in sample_places(1 << 20, 16))


def test_a_file_that_changed_a_moment_ago_is_not_trusted(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second change in the same tick of the file system's clock would not show."""
    assert not read_identities([file]).are_settled
    os.utime(file, (0, 0))
    assert not read_identities([file]).are_settled
    now = file.stat().st_ctime
    monkeypatch.setattr(time, "time", lambda: now + identity.SETTLED_SECONDS + 0.1)
    assert read_identities([file]).are_settled
    os.utime(file, (now + 1000, now + 1000))
    assert not read_identities([file]).are_settled


@pytest.mark.parametrize("num_bytes", [0, 1, 4096 * 16, 4096 * 16 + 1, 10**9])
def test_samples_reach_the_ends(num_bytes: int) -> None:
    places = sample_places(num_bytes, 16)
    assert places[0][0] == 0
    assert sum(places[-1]) == num_bytes
