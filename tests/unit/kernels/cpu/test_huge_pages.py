"""The memory of packed weights."""

from __future__ import annotations

from inflight.kernels.cpu.huge_pages import HugePages


def test_many_pieces_come_from_one_mapping() -> None:
    memory = HugePages()
    pieces = [memory.allocate(size) for size in (1, 100, 64, 5 << 20)]
    assert all(piece.data_ptr() % 64 == 0 and int(piece.sum()) == 0 for piece in pieces)
    for i, piece in enumerate(pieces):
        piece.fill_(i + 1)
    assert [int(piece.max()) for piece in pieces] == [int(piece.min()) for piece in pieces] == [1, 2, 3, 4]
    assert len(memory.allocate(300 << 20)) == 300 << 20
