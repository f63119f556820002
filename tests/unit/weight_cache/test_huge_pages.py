"""Mapped weights that are moved into huge pages while they are read."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from inflight.weight_cache import huge_pages
from inflight.weight_cache.huge_pages import HUGE_PAGE, huge_bytes, move_to_huge_pages, use_huge_pages
from inflight.weight_cache.packed_file import map_file

NUM_BYTES = 8 * HUGE_PAGE


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(NUM_BYTES))
    return path


def mapped(file: Path) -> Tensor:
    opened = os.open(file, os.O_RDONLY)
    try:
        return map_file(opened, NUM_BYTES)
    finally:
        os.close(opened)


def never() -> bool:
    return False


def test_the_numbers_and_their_addresses_stay(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_PIECE", HUGE_PAGE)
    content = mapped(file)
    address = content.data_ptr()
    assert address % HUGE_PAGE == 0
    truth = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
    is_moved = threading.Event()
    wrong = list[int]()

    def read() -> None:
        while not is_moved.is_set():
            if not torch.equal(content, truth):
                wrong.append(1)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    assert move_to_huge_pages(content, never)
    is_moved.set()
    for reader in readers:
        reader.join()
    assert not wrong
    assert content.data_ptr() == address
    assert torch.equal(content, truth)
    content.zero_()
    assert file.read_bytes() == bytes(truth.tolist())


def test_it_ends_when_it_is_told(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_PIECE", HUGE_PAGE)
    content = mapped(file)
    answers = iter([False, False, True])
    assert not move_to_huge_pages(content, lambda: next(answers))
    assert bytes(content.tolist()) == file.read_bytes()


def test_what_lies_in_huge_pages_is_not_moved(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = list[Tensor]()

    def move(content: Tensor, _: object) -> bool:
        moved.append(content)
        return True

    monkeypatch.setattr(huge_pages, "move_to_huge_pages", move)
    monkeypatch.setattr(huge_pages, "_setting", lambda: "always [madvise] never")
    content = mapped(file)
    for huge, num_moved in ((NUM_BYTES, 0), (NUM_BYTES // 2, 1)):
        monkeypatch.setattr(huge_pages, "huge_bytes", lambda _, huge=huge: huge)
        use_huge_pages(content, never)
        assert len(moved) == num_moved
    monkeypatch.setattr(huge_pages, "available_bytes", lambda: NUM_BYTES)
    use_huge_pages(content, never)
    monkeypatch.setattr(huge_pages, "_setting", lambda: "always madvise [never]")
    use_huge_pages(content, never)
    assert len(moved) == 1


def test_a_refusal_leaves_the_weights_as_they_are(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> bool:
        raise OSError("no memory")

    monkeypatch.setattr(huge_pages, "move_to_huge_pages", refuse)
    monkeypatch.setattr(huge_pages, "huge_bytes", lambda _: 0)
    monkeypatch.setattr(huge_pages, "_setting", lambda: "[always]")
    caplog.set_level("INFO")
    content = mapped(file)
    use_huge_pages(content, never)
    assert "stay in small pages: no memory" in caplog.text
    assert bytes(content.tolist()) == file.read_bytes()


def test_huge_pages_are_counted(file: Path) -> None:
    """After the move, what the operating system says is a part of the mapping at most, and no file's page any more."""
    content = mapped(file)
    assert 0 <= huge_bytes(content) <= NUM_BYTES
    assert move_to_huge_pages(content, never)
    assert huge_bytes(content) in range(0, NUM_BYTES + 1, HUGE_PAGE)
