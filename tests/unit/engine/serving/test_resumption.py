"""The front end's part of a recovery: what is sent to the next engine core, and which requests end."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from inflight.engine.request.request_state import RequestState
from inflight.engine.serving.admission import QueueLimits
from inflight.engine.serving.async_llm import AsyncLLM
from inflight.engine.serving.client import CLIENT
from inflight.errors import EngineDeadError, EngineRecoveringError, OverloadedError
from inflight.interface.codec import encode
from inflight.interface.prompt_logprobs import PromptLogprobsPart
from inflight.interface.request import EngineCoreRequest, FinishReason
from inflight.interface.serving import AddRequest
from tests.support.request_parts import prompt_results
from tests.unit.engine.request.output_cases import DELTA, Processor, columns, output, request
from tests.unit.engine.serving.event_loop import run
from tests.unit.engine.serving.lone_front_end import RecordingClient, answer, front_end_of, lone_front_end
from tests.unit.engine.serving.serving import read, reasons_of, tokens_of


def lose(engine: AsyncLLM, client: RecordingClient) -> None:
    client.sent.clear()
    client._lose("gone")


def restore(engine: AsyncLLM, client: RecordingClient) -> list[EngineCoreRequest]:
    """Returns what is sent to the new engine core."""
    client._restore()
    return [sequence for message in client.sent if isinstance(message, AddRequest) for sequence in message.sequences]


def test_unfinished_requests_are_sent_again_with_their_tokens_in_the_order_of_their_arrival() -> None:
    async def test() -> None:
        engine, client = lone_front_end()
        begun, ended = request("begun", n=2), request("ended")
        streams = engine.submit_all([begun, ended])
        answer(engine, [begun], [97, 98])
        answer(engine, [ended], [99], FinishReason.LENGTH)
        lose(engine, client)
        late = engine.submit(request("late"))
        assert client.sent == []
        assert not late.request.sequences[0].emitted_token_ids
        again = restore(engine, client)
        names = [sequence.request_id.split(".", 2)[2] for sequence in again]
        assert names == ["0_begun", "1_begun", "late"]
        assert [sequence.emitted_token_ids for sequence in again] == [(97, 98), (97, 98), ()]
        # only requests that the lost core had received may be the cause of its loss
        assert [sequence.num_losses for sequence in again] == [1, 1, 0]
        lose(engine, client)
        assert [sequence.num_losses for sequence in restore(engine, client)] == [2, 2, 1]
        answer(engine, [begun], [100], FinishReason.LENGTH)
        assert tokens_of(await read(streams[0])) == [97, 98, 100]
        assert reasons_of(await read(streams[1])) == ["length"]
        late.abort()

    run(test)


def test_the_core_knows_whose_request_it_is() -> None:
    """A short name, from which the key cannot be found; the same one after a loss of the core."""

    async def test() -> None:
        engine, client = lone_front_end()
        for request_id, name in (("a", "key 1"), ("b", "key 2"), ("c", "key 1"), ("d", "")):
            CLIENT.set(name)
            engine.submit(request(request_id))
        sent = [
            sequence for message in client.sent if isinstance(message, AddRequest) for sequence in message.sequences
        ]
        one, two, again, own = (sequence.client for sequence in sent)
        assert one == again != two
        assert own == ""
        assert len(one) == len(two) == 12 and "key" not in one
        lose(engine, client)
        assert [sequence.client for sequence in restore(engine, client)] == [one, two, one, ""]
        engine._replicas.engines[0]._finish("gone")

    run(test)


def test_outputs_that_have_arrived_count_when_the_engine_is_lost() -> None:
    async def test() -> None:
        engine, client = lone_front_end(max_num_seqs=4096)
        requests = [request(str(i)) for i in range(500)]
        engine.submit_all(requests)
        answer(engine, requests, [97])  # more than the event loop takes in at once
        lose(engine, client)
        assert [sequence.emitted_token_ids for sequence in restore(engine, client)] == [(97,)] * 500
        engine._replicas.engines[0]._finish("gone")

    run(test)


def test_if_requests_may_not_resume_those_fail_that_were_sent() -> None:
    async def test() -> None:
        engine, client = lone_front_end()
        engine._replicas._limits = replace(engine._replicas._limits, resume_requests_after_recovery=False)
        sent = engine.submit(request("sent"))
        lose(engine, client)
        with pytest.raises(EngineRecoveringError, match="was lost during this request"):
            await read(sent)
        late = engine.submit(request("late"))
        again = restore(engine, client)
        assert [sequence.request_id.endswith(".late") for sequence in again] == [True]
        late.abort()

    run(test)


def test_the_queue_of_a_lost_engine_is_counted_from_zero() -> None:
    async def test() -> None:
        engine, client = lone_front_end(1, QueueLimits(max_queued_requests=2))
        first = [engine.submit(request(str(i))) for i in range(3)]  # one runs, two wait
        with pytest.raises(OverloadedError):
            engine.check_admission()
        lose(engine, client)
        restore(engine, client)
        with pytest.raises(OverloadedError):
            engine.check_admission()  # the same three, and not six
        first[0].abort()
        lose(engine, client)
        restore(engine, client)
        engine.check_admission()
        engine._replicas.engines[0]._finish("gone")

    run(test)


def test_a_loss_is_counted_anew_after_progress() -> None:
    """A core that computes a prompt and one decode has made progress with the request."""
    processor = Processor(None)
    state = processor.add_request(request())
    found = []
    for tokens in ([], [], [97], [], [98, 99], [], [97, 98]):
        processor.process([output("r", tokens)])
        state.count_loss()
        found.append(state.completions[0].num_losses)
    assert found == [1, 2, 3, 4, 1, 2, 1]


def resumed(state: RequestState) -> list[tuple[str, list[int]]]:
    """The ids, and how many prompt tokens are done."""
    return [
        (sequence.request_id, [part.num_done for part in sequence.parts if isinstance(part, PromptLogprobsPart)])
        for sequence in state.resumed_sequences()
    ]


def test_only_unfinished_sequences_are_resumed() -> None:
    processor = Processor(None)
    state = processor.add_request(request(n=3))
    processor.process([output("1_r", [97], FinishReason.LENGTH)])
    assert resumed(state) == [("0_r", []), ("2_r", [])]


def test_log_probabilities_of_the_prompt_go_on_where_they_were() -> None:
    """The first position has none. Only the first sequence has them. They are never computed twice."""
    processor = Processor(None)
    state = processor.add_request(request(prompt=[1, 2, 3, 4], n=2, prompt_logprobs=0), DELTA)
    assert resumed(state) == [("0_r", [1]), ("1_r", [])]
    processor.process([output("0_r", [], parts=prompt_results(columns([2, 3], 0)))])
    assert resumed(state) == [("0_r", [3]), ("1_r", [])]
    (result,) = processor.process([output("0_r", [97], parts=prompt_results(columns([4], 0), 3))]).request_outputs
    assert len(result.prompt_logprobs) == 4
    assert resumed(state) == [("0_r", [4]), ("1_r", [])]


# -- the end of a request --------------------------------------------------------------------------------------------


def test_when_a_request_ends_its_timer_ends_and_a_drain_goes_on() -> None:
    """Otherwise a later request with the same id would be aborted in the middle, and a shutdown would wait for its timeout."""

    async def test() -> None:
        engine, _ = lone_front_end()
        first = request("same")
        stream = engine.submit(first, timeout=1000.0)
        timer = stream._queue.timer
        assert timer is not None
        draining = asyncio.create_task(engine.drain(1000.0))
        await asyncio.sleep(0)
        assert engine.is_draining and not draining.done()
        answer(engine, [first], [97], FinishReason.LENGTH)
        await asyncio.wait_for(draining, 300)
        assert timer.cancelled()
        assert reasons_of(await read(stream)) == ["length"]

    run(test)


def test_a_drain_goes_on_when_a_request_is_not_submitted_after_all() -> None:
    async def test() -> None:
        engine, _ = lone_front_end()
        with engine.accepted():
            draining = asyncio.create_task(engine.drain(1000.0))
            await asyncio.sleep(0)
            assert not draining.done()
        await asyncio.wait_for(draining, 300)

    run(test)


def test_the_message_of_a_request_has_its_prompt_once() -> None:
    async def test() -> None:
        engine, client = lone_front_end()
        prompt = [i % 256 for i in range(2000)]
        stream = engine.submit(request("r", prompt, n=64))
        [message] = client.sent
        assert isinstance(message, AddRequest) and len(message.sequences) == 64
        assert message.prompt_token_ids.tolist() == prompt
        assert len(encode(message).segments) == 1 and encode(message).num_bytes < 4 * 2000 + 64 * 1000
        stream.abort()

    run(test)


def test_without_fault_tolerance_the_requests_of_a_replica_that_has_ended_fail() -> None:
    async def test() -> None:
        engine, clients = front_end_of(2)
        engine._replicas._limits = replace(engine._replicas._limits, enabled=False)
        streams = [engine.submit(request(str(i))) for i in range(6)]
        lost, others = (sum(isinstance(message, AddRequest) for message in client.sent) for client in clients)
        assert lost and others and lost + others == len(streams)
        clients[0]._finish("the replica is gone")
        failed = []
        for stream in streams:
            stream.abort()  # of one that has failed it changes nothing
            try:
                await read(stream)
            except EngineDeadError as error:
                failed.append(str(error))
        assert failed == ["the replica is gone"] * lost
        clients[1]._finish("gone")

    run(test)
