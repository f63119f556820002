"""The simulated replicas count what the router's decisions cost."""

from __future__ import annotations

from benchmarks.serving.routing_scale import BLOCK_SIZE, Prompt, Replica, simulate
from inflight.kv_cache.block_hash import NAME_BYTES


def prompt(first: int, num_blocks: int) -> Prompt:
    names = b"".join(bytes([number]) * NAME_BYTES for number in range(first, first + num_blocks))
    return Prompt("x", names, range(num_blocks * BLOCK_SIZE + 3))


def test_a_replica_finds_what_it_has_and_forgets_the_oldest() -> None:
    replica = Replica(0, num_blocks=6)
    replica.take(prompt(0, 4))
    assert (replica.computed, replica.num_found, len(replica.cached)) == (4 * BLOCK_SIZE + 3, 0, 4)
    replica.take(prompt(0, 4))
    assert (replica.computed, replica.num_found) == (4 * BLOCK_SIZE + 3 + 3, 4 * BLOCK_SIZE)
    replica.take(prompt(10, 4))
    assert len(replica.cached) == 6
    replica.take(prompt(0, 4))
    assert replica.num_found == (4 + 2) * BLOCK_SIZE, "its last two blocks were forgotten"


def test_the_load_falls_as_a_replica_computes() -> None:
    replica = Replica(0, num_blocks=100)
    for first in (0, 10, 20):
        replica.take(prompt(first, 4))
    before = replica.admission.load
    replica.tick(4 * BLOCK_SIZE + 3 + 5)
    assert 0 < replica.admission.load < before - 4 * BLOCK_SIZE
    replica.tick(1000)
    assert replica.admission.load == 0


def test_sessions_come_back_to_their_blocks() -> None:
    name = "tokens found / tokens that one cache of all would have"
    found = dict(simulate(num_replicas=4, num_sessions=80, num_turns=3))
    assert 0.8 < float(found[name]) <= 1.0
    assert 1.0 <= float(found["computed tokens, most / mean"]) < 1.3
    assert dict(simulate(num_replicas=1, num_sessions=20, num_turns=3))[name] == "1.000"
