"""`AsyncLLM` against `LLM` on the embedded model, and against mock steps where time and many requests matter."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time

import pytest

from benchmarks.shared.mock_executor import mock_tokens
from inflight import LLM
from inflight.engine.request.output_processor import Update
from inflight.engine.request.processed import ProcessedRequest
from inflight.engine.request.request_state import RequestOutputKind
from inflight.engine.serving.admission import QueueLimits
from inflight.engine.serving.async_llm import AsyncLLM
from inflight.errors import (
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    RequestTimeoutError,
)
from inflight.sampling_params import SamplingParams
from tests.unit.engine.serving.event_loop import run, until
from tests.unit.engine.serving.serving import (
    EMBEDDED,
    endless,
    mock_engine,
    read,
    reasons_of,
    stats_of,
    submit,
    text_of,
    tokens_of,
)

PROMPTS = ["Hello", "The capital of France is", "once", [5, 6, 7]]


# -- the truth: what LLM gives ---------------------------------------------------------------------------------------


def test_tokens_texts_and_logprobs_are_those_of_llm() -> None:
    params = [
        SamplingParams(max_tokens=12, temperature=0.0, logprobs=2, prompt_logprobs=1),
        SamplingParams(max_tokens=12, temperature=1.0),  # with the seeds of the engine's sequence
        SamplingParams(max_tokens=9, temperature=1.0, n=3),
        SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True),
    ]
    with LLM(**{name: getattr(EMBEDDED, name) for name in ("dtype", "num_threads", "kv_cache_memory_bytes")}) as llm:
        wanted = llm.generate(PROMPTS, params, use_tqdm=False)

    async def test() -> None:
        async with await AsyncLLM.from_args(EMBEDDED) as engine:
            requests = [
                engine.process(str(i), prompt, each)
                for i, (prompt, each) in enumerate(zip(PROMPTS, params, strict=True))
            ]
            processed = await asyncio.gather(*requests)
            streams = [engine.submit(request) for request in processed]
            found = await asyncio.gather(*map(read, streams))
            for outputs, expected in zip(found, wanted, strict=True):
                for completion in expected.outputs:
                    assert tokens_of(outputs, completion.index) == completion.token_ids
                    assert text_of(outputs, completion.index) == completion.text
                    assert completion.finish_reason in reasons_of(outputs) or len(expected.outputs) > 1
            logprobs = [row for output in found[0] for row in output.outputs[0].logprobs or ()]
            assert [list(row) for row in logprobs] == [list(row) for row in wanted[0].outputs[0].logprobs or ()]
            (prompt_rows,) = [output.prompt_logprobs for output in found[0] if output.prompt_logprobs is not None]
            assert [row and list(row) for row in prompt_rows] == [
                row and list(row) for row in wanted[0].prompt_logprobs
            ]
            last = [o async for o in engine.generate(PROMPTS[3], params[3], kind=RequestOutputKind.FINAL_ONLY)]
            assert [output.outputs[0].token_ids for output in last] == [wanted[3].outputs[0].token_ids]
            assert await engine.encode("Hello") == processed[0].prompt_token_ids
            assert await engine.decode(processed[0].prompt_token_ids) == "Hello"
            chat = await engine.render_chat([{"role": "user", "content": "Hi"}])
            assert "Hi" in await engine.decode(chat)

    run(test)


def test_a_stop_string_ends_the_request_in_the_engine_too() -> None:
    async def test() -> None:
        async with mock_engine() as engine:
            [full] = [o async for o in engine.generate("x", endless(60), kind=RequestOutputKind.FINAL_ONLY)]
            text = full.outputs[0].text
            stop = text[20:26]
            outputs = await read(await submit(engine, "a", "x", endless(1500, stop=[stop])))
            assert text_of(outputs) == text[: text.index(stop)]
            assert outputs[-1].outputs[0].stop_reason == stop
            await until(lambda: stats_of(engine) is not None and stats_of(engine).num_running == 0)

    run(test)


def test_the_front_end_loads_no_torch() -> None:
    code = "import sys, inflight.engine.serving.async_llm; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- streams -------------------------------------------------------------------------------------------------------


def test_what_a_slow_reader_has_not_read_is_merged_and_no_token_is_lost() -> None:
    async def test() -> None:
        async with mock_engine() as engine:
            slow, fast = [await submit(engine, name, "abc", endless(200)) for name in ("slow", "fast")]
            quick = await read(fast)
            await until(lambda: slow._queue.state.finished)
            merged = await read(slow)
            wanted = mock_tokens(engine.tokenizer, slow.request.prompt_token_ids, 200)
            assert len(quick) > 50
            assert len(merged) == 1
            assert tokens_of(merged) == tokens_of(quick) == wanted
            assert text_of(merged) == text_of(quick)

    run(test)


def test_an_event_loop_that_stands_still_loses_no_token() -> None:
    """What is sent meanwhile is merged in the engine's process."""

    async def test() -> None:
        async with mock_engine() as engine:
            streams = [await submit(engine, str(i), f"prompt {i}", endless(150)) for i in range(32)]
            await streams[0].__anext__()
            time.sleep(1.0)
            for stream in streams:
                tokens = tokens_of(await read(stream))
                wanted = mock_tokens(engine.tokenizer, stream.request.prompt_token_ids, 150)
                assert tokens == wanted[-len(tokens) :]
                assert len(tokens) == 150 or stream is streams[0]

    run(test)


def test_random_cancels_leave_nothing_behind() -> None:
    async def test() -> None:
        rng = random.Random(0)
        async with mock_engine({"max_num_seqs": 64}) as engine:

            async def one(i: int) -> None:
                params = (
                    endless(rng.randrange(1, 200), n=1)
                    if i % 4
                    else SamplingParams(n=3, max_tokens=100, ignore_eos=True)
                )
                generator = engine.generate("word " * rng.randrange(1, 300), params)
                try:
                    async with asyncio.timeout(rng.random() * 0.3):
                        async for _ in generator:
                            pass
                except TimeoutError:
                    pass
                finally:
                    await generator.aclose()

            await asyncio.gather(*(one(i) for i in range(200)))
            assert len(engine._requests) == 0

            def is_idle() -> bool:
                stats = stats_of(engine)
                return stats is not None and (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)

            await until(is_idle)
            assert len(tokens_of(await read(await submit(engine, "a", "x", endless(5))))) == 5

    run(test)


def test_abort_and_reuse_of_an_id() -> None:
    async def test() -> None:
        async with mock_engine() as engine:
            first = await submit(engine, "a", "x", endless())
            await first.__anext__()
            with pytest.raises(InvalidRequestError, match="still running"):
                await submit(engine, "a", "y", endless())
            first.abort()
            first.abort()
            second = await submit(engine, "a", "y", endless(5))  # outputs of the first one are still on their way
            assert reasons_of(await read(first)) == ["abort"]
            assert tokens_of(await read(second)) == mock_tokens(engine.tokenizer, second.request.prompt_token_ids, 5)
            third = await submit(engine, "b", "x", endless())
            await engine.abort("b")
            await engine.abort("unknown")
            assert reasons_of(await read(third)) == ["abort"]
            fourth = await submit(engine, "c", "x", endless())
            await fourth.aclose()
            assert await read(fourth) == []

    run(test)


def test_a_timeout() -> None:
    async def test() -> None:
        async with mock_engine() as engine:
            stream = await submit(engine, "a", "x", endless(), timeout=0.1)
            start = time.monotonic()
            with pytest.raises(RequestTimeoutError, match=r"timeout of 0\.1 s"):
                await read(stream)
            assert time.monotonic() - start < 60
            assert len(engine._requests) == 0
            stream = await submit(engine, "a", "x", endless(3), timeout=300.0)
            assert len(await read(stream)) >= 1
            assert stream._queue.timer is not None and stream._queue.timer.cancelled()

    run(test)


def test_what_cannot_be_taken_in_at_all_is_the_end_and_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with mock_engine() as engine:
            streams = [await submit(engine, str(i), "x", endless()) for i in range(3)]
            await streams[0].__anext__()

            def update(outputs: object) -> Update:
                raise ZeroDivisionError("a defect")

            monkeypatch.setattr(engine._requests.outputs, "update", update)
            for stream in streams:
                with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
                    await read(stream)

    run(test)


# -- the queue -----------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_at_once() -> None:
    async def test() -> None:
        limits = QueueLimits(max_queued_requests=4)
        async with mock_engine({"max_num_seqs": 2}, limits=limits) as engine:
            streams = [await submit(engine, str(i), "x", endless()) for i in range(6)]  # two slots, four wait
            for _ in range(3):  # before and after a report of the engine
                start = time.monotonic()
                with pytest.raises(OverloadedError, match=r"4 sequences wait, .* 4 ") as caught:
                    engine.submit(await engine.process("more", "x", endless()))
                assert time.monotonic() - start < 60
                assert 1 <= caught.value.retry_after_seconds <= 60
                with pytest.raises(OverloadedError):
                    engine.check_admission()
                await asyncio.sleep(0.1)
            streams[-1].abort()
            await until(lambda: stats_of(engine).num_waiting == 3)
            streams.append(await submit(engine, "more", "x", endless()))
            for stream in streams:
                stream.abort()

    run(test)


def test_a_queue_full_of_tokens() -> None:
    async def test() -> None:
        limits = QueueLimits(max_queued_tokens=300)
        async with mock_engine({"max_num_seqs": 1}, limits=limits) as engine:
            streams = [await submit(engine, "large", [7] * 1000, endless(1000))]  # whatever its size: nothing waits
            await streams[0].__anext__()
            await until(lambda: stats_of(engine) is not None and stats_of(engine).num_running == 1)
            streams += [await submit(engine, f"{i}", [7] * 140, endless()) for i in range(2)]
            with pytest.raises(OverloadedError, match=r"280 .* 300 "):
                await submit(engine, "more", [7] * 140, endless())
            streams.append(await submit(engine, "small", [7] * 20, endless()))
            for stream in streams:
                stream.abort()

    run(test)


def test_requests_that_belong_together_are_admitted_as_one() -> None:
    async def test() -> None:
        limits = QueueLimits(max_queued_requests=4, max_queued_tokens=40)
        async with mock_engine({"max_num_seqs": 2}, limits=limits) as engine:

            async def some(*names: str) -> list[ProcessedRequest]:
                return [
                    await engine.process(name, [7] * 10, SamplingParams(n=2, max_tokens=5, ignore_eos=True))
                    for name in names
                ]

            with pytest.raises(InvalidRequestError, match=r"12 sequences .* at most 6 are allowed"):
                engine.submit_all(await some(*"abcdef"))
            more = await some("g")  # nothing is awaited between the next two calls, so none of the three ends
            streams = engine.submit_all(await some(*"abc"))  # two have slots, four wait
            with pytest.raises(OverloadedError):
                engine.submit_all(more)
            for stream in streams:
                assert len(tokens_of(await read(stream))) == 5
            await until(lambda: stats_of(engine).num_running == 0)
            with pytest.raises(InvalidRequestError, match="still running"):
                engine.submit_all(await some("g", "g"))
            assert len(engine._requests) == 0  # none was started
            again = await some("h", "g")
            running = engine.submit_all(await some("g"))  # two have slots, and there is room for two
            with pytest.raises(InvalidRequestError, match="'g' is still running"):
                engine.submit_all(again)
            assert len(engine._requests) == 1
            assert len(tokens_of(await read(running[0]))) == 5

    run(test)


# -- the end ---------------------------------------------------------------------------------------------------------


def test_drain() -> None:
    async def test() -> None:
        async with mock_engine() as engine:
            streams = [await submit(engine, str(i), "x", endless(40)) for i in range(20)]
            request = await engine.process("late", "x", endless())
            drained = asyncio.create_task(engine.drain(300.0))
            await asyncio.sleep(0)
            assert engine.is_draining
            with pytest.raises(EngineClosedError, match="accepts no more"):
                engine.submit(request)
            await drained
            assert [reasons_of(await read(stream)) for stream in streams] == [["length"]] * 20
        async with mock_engine() as engine:
            stream = await submit(engine, "a", "x", endless())
            start = time.monotonic()
            await engine.drain(0.2)
            assert 0.2 <= time.monotonic() - start < 60
            assert reasons_of(await read(stream)) == ["abort"]

    run(test)


def test_a_drain_waits_for_what_is_accepted_and_no_longer_than_its_time() -> None:
    async def test() -> None:
        async with mock_engine() as engine:
            with engine.accepted():
                drained = asyncio.create_task(engine.drain(300.0))
                await asyncio.sleep(0.05)  # nothing runs
                assert not drained.done()
                with pytest.raises(EngineClosedError, match="accepts no more"), engine.accepted():
                    pass
                first = await submit(engine, "a", "x", endless(3))
                assert reasons_of(await read(first)) == ["length"]
                await asyncio.sleep(0.01)
                second = await submit(engine, "b", "x", endless(3))
            assert not drained.done()
            assert reasons_of(await read(second)) == ["length"]
            await drained
        async with mock_engine() as engine:
            with engine.accepted():
                await engine.drain(0.05)
                with pytest.raises(EngineClosedError, match="accepts no more"):
                    await submit(engine, "a", "x", endless(3))
        async with mock_engine() as engine:
            with pytest.raises(InvalidRequestError):
                [_ async for _ in engine.generate([], endless(3))]
            await engine.drain(300.0)  # what was accepted has ended

    run(test)


def test_a_deadline_counts_from_the_arrival() -> None:
    async def test() -> None:
        async with mock_engine() as engine:
            request = await engine.process("a", "x", endless(), arrival_time=time.monotonic() - 60)
            with pytest.raises(RequestTimeoutError):
                await read(engine.submit(request, timeout=60.1))

    run(test)


def test_close_fails_what_is_unfinished() -> None:
    async def test() -> None:
        engine: AsyncLLM
        async with mock_engine() as engine:
            stream = await submit(engine, "a", "x", endless())
            await stream.__anext__()
        await engine.close()
        with pytest.raises(EngineClosedError):
            await read(stream)
        for call in (engine.check_health, engine.check_ready, engine.reset_prefix_cache):
            with pytest.raises(EngineClosedError):
                await call()
        with pytest.raises(EngineClosedError):
            await engine.process("b", "x")

    run(test)


# -- seeds ----------------------------------------------------------------------------------------------------------


def test_seeds_follow_the_order_of_the_calls() -> None:
    async def test() -> None:
        async with mock_engine({"seed": 3}) as engine:
            prompts = ["long " * 400, "short"]
            first = await asyncio.gather(*(engine.process(str(i), prompt) for i, prompt in enumerate(prompts)))
        async with mock_engine({"seed": 3}) as engine:
            second = [await engine.process(str(i), prompt) for i, prompt in enumerate(prompts)]
        assert [r.sequences[0].sampling.seed for r in first] == [r.sequences[0].sampling.seed for r in second]
        assert first[0].sequences[0].sampling.seed != first[1].sequences[0].sampling.seed

    run(test)
