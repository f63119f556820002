"""Several replicas of the engine: a request goes where its prefix is cached, unless this replica has too much work."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from inflight.engine.request.processed import ProcessedRequest
from inflight.engine.serving import cached_index
from inflight.engine.serving.cached_index import CachedIndex
from inflight.interface.serving import CachedBlocks
from inflight.kv_cache.block_hash import BlockHasher
from tests.unit.engine.request.output_cases import request
from tests.unit.engine.serving.event_loop import run
from tests.unit.engine.serving.lone_front_end import DRAWN, RecordingClient, front_end_of, report

HASHER = BlockHasher("model", 16)


def prompt(length: int, salt: str = "", first: int = 97) -> ProcessedRequest:
    """A request that knows the names of its blocks."""
    made = request(f"{first}-{length}-{salt}", [first] * length)
    return replace(made, block_names=HASHER.names(salt, made.prompt_array))


def cache(client: RecordingClient, made: ProcessedRequest, num_blocks: int) -> None:
    stored = client.cached.entries(made.block_names)[:num_blocks]
    client.cached.apply(CachedBlocks(stored=b"".join(stored), removed=b""))


def test_cached_tokens_are_no_work() -> None:
    async def test() -> None:
        engine, (first, second) = front_end_of(2)
        cache(second, prompt(800), 40)
        assert len(prompt(161).block_names) == 32 * 10 and len(prompt(160).block_names) == 32 * 9
        for salt, length, expected in [("", 161, second), ("a", 161, first), ("b", 161, second)]:
            report(first, 0)
            report(second, 0, num_running=1 if salt == "a" else 0)  # without a hit, the idle one
            if salt == "b":
                report(first, 0, num_running=1)
            made = prompt(length, salt)
            engine.submit(made)
            assert engine._requests.outputs._requests[made.request_id].engine == expected.index
        report(first, 99)
        report(second, 99)
        engine.submit(prompt(641))
        assert second.admission.load == 1 + DRAWN
        # the hit is worth 640 tokens to be computed, as much as 960: more than three sequences, less than four
        report(second, 99, num_running=3, num_running_tokens=3)
        engine.submit(prompt(642))
        report(first, 99)
        report(second, 99, num_running=4, num_running_tokens=4)
        engine.submit(prompt(643))
        report(first, 99)
        report(second, 99)
        second._lose("gone")  # its next process has no cache
        second._restore()
        assert len(second.cached) == 0
        at = [engine._requests.outputs._requests[f"97-{length}-"].engine for length in (641, 642, 643)]
        assert at == [0, 0, 0] and first.num_requests == 6  # those of the second went to the first when it was lost
        first._finish("gone")
        second._finish("gone")

    run(test)


# shared tokens that one replica has cached, own tokens of each prompt, prompts, tokens that each of them draws
GROUPS = [
    (600, 1, 16, 300),
    (1500, 20, 32, 100),
    (1500, 20, 16, 100),
    (400, 20, 24, 100),
    (4000, 1, 200, 64),
    (64, 1, 9, 9),
]


@pytest.mark.parametrize("in_one_call", [True, False])
@pytest.mark.parametrize(("shared", "own", "count", "drawn"), GROUPS)
def test_a_group_is_spread_when_its_replica_is_full(
    shared: int, own: int, count: int, drawn: int, in_one_call: bool
) -> None:
    """The busier replica has no more to do than if the group had been divided without a look at the caches."""

    def member(i: int) -> ProcessedRequest:
        made = prompt(shared + own)
        tokens = [*made.prompt_token_ids[:shared], *[i % 250] * own]
        prompt_array = np.array(tokens, np.int32)
        made = request(f"{i}", tokens, max_tokens=drawn, ignore_eos=True)
        return replace(
            made,
            sequences=tuple(
                replace(each, sampling=replace(each.sampling, max_tokens=drawn)) for each in made.sequences
            ),
            block_names=HASHER.names("", prompt_array),
        )

    async def test() -> None:
        engine, clients = front_end_of(2, max_num_seqs=256)
        members = [member(i) for i in range(count)]
        cache(clients[0], members[0], shared // 16)
        if in_one_call:
            engine.submit_all(members)
        else:
            for each in members:
                engine.submit(each)
        at = [sum(state.engine == index for state in engine._requests.outputs.unfinished()) for index in (0, 1)]
        busier = max(at[0] * (own + drawn), at[1] * (own + drawn) + (shared if at[1] else 0))
        divided = count / 2 * (own + drawn) + shared
        assert busier <= divided + own + drawn and sum(at) == count
        for client in clients:
            client._finish("gone")

    run(test)


def test_a_prompt_that_was_sent_counts_as_cached_until_its_request_ends() -> None:
    async def test() -> None:
        engine, (first, second) = front_end_of(2)
        leader, block = prompt(161), 16
        stream = engine.submit_all([leader], data_parallel_rank=1)[0]
        follower = prompt(163)
        assert second.cached.num_cached(follower.block_names) == 10 and first.cached.num_cached(leader.block_names) == 0
        assert len(second.cached) == 0, "nothing was reported yet"
        work = [engine._replicas.router.work(each, follower) for each in (first, second)]
        assert work[0] - work[1] == 10 * block
        other = engine.submit_all([follower], data_parallel_rank=1)[0]
        stream.abort()
        assert second.cached.num_cached(leader.block_names) == 10, "another request has it, too"
        other.abort()
        assert second.cached.num_cached(leader.block_names) == 0
        lost = engine.submit_all([prompt(165)], data_parallel_rank=1)[0]
        second._lose("gone")  # the request goes on at the first one
        assert [each.cached.num_cached(leader.block_names) for each in (first, second)] == [10, 0]
        lost.abort()
        assert not first.cached._prompts and not first.cached._expected
        first._finish("gone")
        second._finish("gone")

    run(test)


def test_prompts_that_begin_alike_come_together() -> None:
    """If nothing else decides. Every front end decides alike."""

    async def test() -> None:
        chosen = []
        for _ in range(2):
            engine, clients = front_end_of(4)
            for i in range(40):
                made = prompt(33, first=i + 1)
                engine.submit(made)
                state = engine._requests.outputs._requests[made.request_id]
                chosen.append(state.engine)
                for client in clients:
                    report(client, 99)
            for client in clients:
                client._finish("gone")
        assert chosen[:40] == chosen[40:] and set(chosen) == {0, 1, 2, 3}

    run(test)


def test_of_windows_the_last_cached_blocks_count() -> None:
    """Blocks that the windows have left behind are evicted first, and nobody needs them."""
    index, names = CachedIndex(), [bytes([65 + i]) * 32 for i in range(6)]
    for kinds, expected in (((0,), [0, 0, 6]), ((1,), [4, 0, 6]), ((2,), [4, 0, 6]), ((3,), [0, 0, 6])):
        stored = b"".join(name + b"\0" for name in names[2:4])
        index.apply(CachedBlocks(stored=stored, removed=b"", is_first=True, kinds=kinds))
        asked = [b"".join(names), b"".join(names[:2]), b"".join(names)]
        more = index.entries(b"".join(names))
        assert [index.num_cached(each, extra) for each, extra in zip(asked, ((), (), more), strict=True)] == expected


def test_the_index_of_cached_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_index, "MAX_INDEX_BYTES", 5 * cached_index.ENTRY_BYTES)
    block_names = prompt(97).block_names
    a, b, c, d, e, f = (block_names[i : i + 32] + b"\0" for i in range(0, 192, 32))
    index = CachedIndex()
    index.apply(CachedBlocks(stored=a + b + d, removed=c))
    assert index.num_cached(block_names) == 2
    index.apply(CachedBlocks(stored=c + e + f, removed=b""))  # no room for the last one
    assert index.num_cached(block_names) == 5
    index.expect("r", block_names)  # there is no room for it
    index.forget("r")
    index.forget("unknown")
    assert index.num_cached(block_names) == 5
    index.apply(CachedBlocks(stored=b"", removed=a))
    assert index.num_cached(block_names) == 0 and len(index) == 4
    index.apply(CachedBlocks(stored=a, removed=b"", is_first=True))
    assert index.num_cached(block_names) == 1 and len(index) == 1
    assert index.num_cached(b"") == 0
