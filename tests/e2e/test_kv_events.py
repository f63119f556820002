"""`kv_events_config` with real engines: a subscriber outside knows the tokens in the prefix cache of each replica."""

from __future__ import annotations

import asyncio
import os
import signal

import msgspec
import pytest
import zmq

from benchmarks.shared.free_port import free_port
from inflight import LLM, SamplingParams
from inflight.config.engine_args import EngineArgs
from inflight.engine.serving.async_llm import AsyncLLM
from inflight.errors import ConfigError
from tests.support.kv_event_stream import AllBlocksCleared, Batch, BlocksRemoved, BlockStored, connect

BLOCK = 16


def test_a_subscriber_knows_what_each_replica_has_cached() -> None:
    """The replay endpoint gives all events from the first one on, so no subscription is late. A replica that is killed begins
    again with an empty cache."""
    port = free_port(4)
    replay_port = port + 2
    args = EngineArgs(
        max_model_len=256,
        block_size=BLOCK,
        num_threads=1,
        data_parallel_size=2,
        kv_cache_memory_bytes=1 << 24,
        kv_events_config={
            "enable_kv_cache_events": True,
            "endpoint": f"tcp://*:{port}",
            "replay_endpoint": f"tcp://*:{replay_port}",
        },
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def events(replica: int) -> list[BlockStored | BlocksRemoved | AllBlocksCleared]:
        """All events of this replica since it has started."""
        replay = connect(context, zmq.DEALER, f"tcp://127.0.0.1:{replay_port}", replica)
        replay.send_multipart([b"", (0).to_bytes(8, "big")])
        found = []
        while (frames := replay.recv_multipart())[2]:
            batch = msgspec.msgpack.decode(frames[2], type=Batch)
            assert batch.data_parallel_rank == replica
            found += batch.events
        replay.close()
        return found

    async def wait_for(replica: int, num_blocks: int) -> list[BlockStored | BlocksRemoved | AllBlocksCleared]:
        while True:
            found = await asyncio.to_thread(events, replica)
            if sum(len(each.block_hashes) for each in found if isinstance(each, BlockStored)) >= num_blocks:
                return found
            await asyncio.sleep(0.05)

    async def test() -> None:
        engine = await AsyncLLM.from_args(args)
        try:
            prompt = list(range(100, 100 + 5 * BLOCK + 3))

            async def generate(tokens: list[int], replica: int, salt: str = "") -> list[int]:
                params = SamplingParams(max_tokens=BLOCK, temperature=0.0, ignore_eos=True)
                async for output in engine.generate(tokens, params, data_parallel_rank=replica, cache_salt=salt):
                    last = output
                return list(last.outputs[0].token_ids)

            drawn = await generate(prompt, 1)
            await generate(prompt, 1, salt="secret")
            await generate(prompt[: 2 * BLOCK] + [7] * (2 * BLOCK), 1)
            found = await wait_for(1, 6 + 2)
            assert isinstance(found[0], AllBlocksCleared)
            known: dict[object, list[int]] = {None: []}
            for event in found[1:]:
                assert isinstance(event, BlockStored) and event.block_size == BLOCK
                before = known[event.parent_block_hash]
                for index, number in enumerate(event.block_hashes):
                    before = known[number] = before + event.token_ids[index * BLOCK : (index + 1) * BLOCK]
            longest = max(known.values(), key=len)
            assert longest == (prompt + drawn)[: len(longest)] and len(longest) == 6 * BLOCK
            assert prompt[: 2 * BLOCK] + [7] * BLOCK in known.values()
            assert await asyncio.to_thread(events, 0) == [AllBlocksCleared()]

            await engine.reset_prefix_cache()
            while (await asyncio.to_thread(events, 1))[-1] != AllBlocksCleared():
                await asyncio.sleep(0.05)

            process = engine._keepers[1].process
            assert process is not None
            os.kill(process.process.pid, signal.SIGKILL)
            while True:  # while the replica starts, the other one gets the prompts
                assert await generate(prompt, 1) == drawn
                first, *others = await asyncio.to_thread(events, 1)
                assert first == AllBlocksCleared()
                if others and AllBlocksCleared() not in others:
                    break
                await asyncio.sleep(0.05)
            known_again = [number for each in others if isinstance(each, BlockStored) for number in each.block_hashes]
            assert known_again == list(known)[1:7], "equal tokens have equal numbers"
        finally:
            await engine.close()

    try:
        asyncio.run(asyncio.wait_for(test(), 300))
    finally:
        context.destroy(linger=0)


def test_the_engine_of_one_process_publishes_nothing() -> None:
    with pytest.raises(ConfigError, match="publishes no events"):
        LLM(kv_events_config={"enable_kv_cache_events": True})
