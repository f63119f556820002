"""`Backlog`: slices of the event loop, in order, and the client that is paused meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from inflight.engine.request.output_processor import OutputProcessor
from inflight.engine.serving import backlog as backlog_module
from inflight.engine.serving.backlog import SLICE_LOGPROBS, SLICE_OUTPUTS, Backlog
from inflight.engine.serving.engine_client import EngineListener
from inflight.interface.prompt_logprobs import PromptLogprobsResult
from inflight.interface.request import EngineCoreOutput, FinishReason
from inflight.outputs import RequestOutput
from tests.support.fakes_tokenizer import byte_tokenizer
from tests.support.request_parts import prompt_results
from tests.unit.engine.request.output_cases import columns, output, request, without_times
from tests.unit.engine.serving.lone_front_end import RecordingClient


def make(take_in: Callable[[Sequence[EngineCoreOutput]], None]) -> tuple[Backlog, RecordingClient]:
    listener = SimpleNamespace(process=take_in)
    client = RecordingClient(cast("EngineListener", listener))
    return Backlog(client, take_in), client


def outputs(count: int) -> list[EngineCoreOutput]:
    return [output(str(i), [i]) for i in range(count)]


async def until_empty(backlog: Backlog) -> None:
    async with asyncio.timeout(300):
        while backlog._outputs:
            await asyncio.sleep(0)
    await asyncio.sleep(0)


def test_a_large_batch_is_taken_in_in_slices_and_in_order() -> None:
    async def test() -> None:
        taken: list[list[EngineCoreOutput]] = []

        def take_in(some: Sequence[EngineCoreOutput]) -> None:
            time.sleep(0.0004)
            taken.append(list(some))

        backlog, client = make(take_in)
        given = outputs(300)
        start = time.perf_counter()
        backlog.extend(given[:200])
        assert len(taken) * SLICE_OUTPUTS < 200, "others come in between"
        assert time.perf_counter() - start < 60
        backlog.extend(given[200:])
        await until_empty(backlog)
        assert [each for some in taken for each in some] == given
        assert max(map(len, taken)) == SLICE_OUTPUTS
        assert client.calls == []

    asyncio.run(test())


def test_the_client_is_paused_while_too_much_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog_module, "MAX_BACKLOG", 40)
    monkeypatch.setattr(backlog_module, "SLICE_SECONDS", -1.0)  # a slice is over before it has begun

    async def test() -> None:
        taken: list[EngineCoreOutput] = []
        backlog, client = make(taken.extend)
        given = outputs(90)
        backlog.extend(given[:40])
        assert client.calls == []
        backlog.extend(given[40:60])
        backlog.extend(given[60:])  # what was read before the pause
        assert client.calls == ["pause"]
        monkeypatch.setattr(backlog_module, "SLICE_SECONDS", 10.0)
        await until_empty(backlog)
        assert client.calls == ["pause", "resume"]
        monkeypatch.setattr(backlog_module, "SLICE_SECONDS", -1.0)
        backlog.extend(given[:41])
        assert client.calls == ["pause", "resume", "pause"]
        assert taken == given

    asyncio.run(test())


def test_the_next_connection_is_paused_too_if_the_last_one_ended_while_it_was_paused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine was lost while too many outputs waited, and another engine takes its place."""
    monkeypatch.setattr(backlog_module, "MAX_BACKLOG", 40)
    monkeypatch.setattr(backlog_module, "SLICE_SECONDS", -1.0)  # a slice is over before it has begun

    async def test() -> None:
        taken: list[EngineCoreOutput] = []
        backlog, client = make(taken.extend)
        given = outputs(100)
        backlog.extend(given[:50])
        assert client.calls == ["pause"]
        backlog.finish()
        assert taken == given[:50]
        backlog.extend(given[50:])
        assert client.calls == ["pause", "pause"]

    asyncio.run(test())


def test_what_cannot_be_taken_in_ends_the_client() -> None:
    async def test() -> None:
        def take_in(some: Sequence[EngineCoreOutput]) -> None:
            raise ZeroDivisionError("a defect")

        backlog, client = make(take_in)
        backlog.extend(outputs(50))
        assert client.ended == ["the front end failed to process outputs of the engine: ZeroDivisionError('a defect')"]
        backlog.finish()
        assert len(client.ended) == 1, "what else is here is not tried"

    asyncio.run(test())


def test_at_the_end_all_is_taken_in_at_once() -> None:
    async def test() -> None:
        taken: list[EngineCoreOutput] = []

        def take_in(some: Sequence[EngineCoreOutput]) -> None:
            time.sleep(0.002)
            taken.extend(some)

        backlog, _ = make(take_in)
        given = outputs(100)
        backlog.extend(given)
        assert len(taken) < 100
        backlog.finish()
        assert taken == given
        await asyncio.sleep(0.01)  # the slice that was due finds nothing
        assert taken == given

    asyncio.run(test())


@pytest.mark.parametrize("finish", [None, FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR])
@pytest.mark.parametrize(("num_prompt", "num_tokens"), [(500, 0), (500, 1), (0, 300), (700, 300), (2, 500)])
def test_an_output_with_many_logprobs_is_taken_in_in_pieces(
    num_prompt: int, num_tokens: int, finish: FinishReason | None
) -> None:
    """What becomes of them is the same."""
    k = 20
    prompt = [97 + i % 20 for i in range(num_prompt + 1)]
    tokens = [97 + i % 7 for i in range(num_tokens)]
    large = output(
        "r",
        tokens,
        finish,
        logprobs=columns(tokens, k) if tokens else None,
        parts=prompt_results(columns(prompt[1:], k)) if num_prompt else (),
        stop_reason=5 if finish is FinishReason.STOP and tokens else None,
        error="a failure" if finish is FinishReason.ERROR else "",
        num_cached_tokens=16,
    )

    def processed(in_pieces: bool) -> list[RequestOutput]:
        processor = OutputProcessor(byte_tokenizer())
        wanted = {"prompt_logprobs": k if num_prompt else None, "logprobs": k}
        state = processor.add_request(request(prompt=prompt, **wanted))
        sizes: list[int] = []

        def take_in(some: Sequence[EngineCoreOutput]) -> None:
            sizes.append(sum(backlog_module._num_logprobs(each) for each in some))
            processor.update(some)

        backlog, _ = make(take_in)
        if in_pieces:
            backlog.extend([large])
            backlog.finish()
            assert max(sizes) <= 2 * SLICE_LOGPROBS
            assert len(sizes) >= 3
        else:
            take_in([large])
        if not state.finished:
            processor.abort(["r"])
        found = state.take_output()
        assert found is not None
        return [without_times(found)]

    async def test() -> None:
        whole = processed(in_pieces=False)
        assert processed(in_pieces=True) == whole
        assert len(whole[0].outputs[0].token_ids) == num_tokens

    asyncio.run(test())


def test_small_outputs_with_logprobs_are_taken_in_together() -> None:
    async def test() -> None:
        sizes: list[int] = []
        backlog, _ = make(lambda some: sizes.append(len(some)))
        backlog.extend([output(str(i), [97], logprobs=columns([97], 5)) for i in range(SLICE_OUTPUTS)])
        wide = [output(str(i), [97] * 30, logprobs=columns([97] * 30, 20)) for i in range(8)]
        backlog.extend(wide)
        backlog.finish()
        assert sizes[0] == SLICE_OUTPUTS
        assert sizes[1:] == [2] * 4, "1,260 log-probabilities are enough"

    asyncio.run(test())


def test_numpy_is_not_copied() -> None:
    """A piece is a view of the output's columns."""
    whole = columns([97] * 500, 20)
    for piece in backlog_module._pieces(output("r", [], parts=prompt_results(whole))):
        for part in piece.parts:
            assert isinstance(part, PromptLogprobsResult)
            assert np.shares_memory(part.columns.token_ids, whole.token_ids)
