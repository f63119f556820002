"""`RequestBlocks`: a request that has begun nothing."""

from __future__ import annotations

from inflight.kv_cache.request_blocks import RequestBlocks


def test_nothing_is_known_at_first() -> None:
    first, second = RequestBlocks(([], []), b"root"), RequestBlocks(([], []), b"root")
    first.hashes.append(b"name")
    assert second.hashes == [] and second.num_committed == second.num_found == 0
    assert second.num_shared < 0 and second.may_be_named
