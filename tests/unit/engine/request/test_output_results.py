"""What the results of `OutputProcessor` hold: log-probabilities, metrics, and what a resumed request had before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from inflight.engine.request.output_processor import OutputProcessor
from inflight.engine.request.request_state import RequestOutputKind
from inflight.interface.events import ContentDelta, Event, ReasoningDelta
from inflight.interface.prompt_logprobs import PromptLogprobsPart
from inflight.interface.request import EngineCoreOutput, EngineCoreRequest, FinishReason, LogprobsColumns
from inflight.outputs import Logprob
from inflight.parsers.selector import create_output_parser
from tests.support.fakes_tokenizer import byte_tokenizer
from tests.support.request_parts import prompt_results
from tests.unit.engine.request.output_cases import CUMULATIVE, DELTA, FINAL_ONLY, Processor, columns, output, request


def test_logprobs_are_trimmed_and_hold_the_token_itself() -> None:
    processor = Processor(byte_tokenizer())
    processor.add_request(request(logprobs=1))
    given_columns = LogprobsColumns(
        token_ids=np.array([[97, 98, 97], [98, 98, 99]], np.int32),
        logprobs=np.array([[-2.0, -0.5, -2.0], [-0.25, -0.25, -3.0]], np.float32),
        ranks=np.array([2, 1], np.int32),
    )
    done = processor.process([output("r", [97, 98], FinishReason.LENGTH, logprobs=given_columns)])
    [completion] = done.request_outputs[0].outputs
    assert completion.logprobs == [{97: Logprob(-2.0, 2, "a"), 98: Logprob(-0.5, 1, "b")}, {98: Logprob(-0.25, 1, "b")}]
    assert completion.cumulative_logprob == -2.25
    assert done.request_outputs[0].prompt_logprobs is None


def test_a_tied_token_has_one_entry_with_its_own_rank() -> None:
    processor = Processor(byte_tokenizer())
    processor.add_request(request(logprobs=2))
    tied = LogprobsColumns(
        token_ids=np.array([[98, 97, 98]], np.int32),
        logprobs=np.array([[-0.5, -0.5, -0.5]], np.float32),
        ranks=np.array([1], np.int32),
    )
    done = processor.process([output("r", [98], FinishReason.LENGTH, logprobs=tied)])
    assert done.request_outputs[0].outputs[0].logprobs == [{98: Logprob(-0.5, 1, "b"), 97: Logprob(-0.5, 1, "a")}]


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA, FINAL_ONLY])
def test_prompt_logprobs_come_whole(kind: RequestOutputKind) -> None:
    processor = Processor(byte_tokenizer())
    processor.add_request(request(prompt=[97, 98, 99, 100], prompt_logprobs=0), kind)
    results = processor.process([output("r", [], parts=prompt_results(columns([98, 99], 2)))]).request_outputs
    assert all(result.prompt_logprobs is None for result in results)
    results += processor.process([output("r", [1], parts=prompt_results(columns([100], 2), 3))]).request_outputs
    results += processor.process([output("r", [2], FinishReason.LENGTH)]).request_outputs
    expected = [None, *({i: Logprob(-0.5 - i, i + 3, chr(i))} for i in (98, 99, 100))]
    found = [result.prompt_logprobs for result in results if result.prompt_logprobs is not None]
    assert found == [expected] * (2 if kind is CUMULATIVE else 1)


def test_metrics_and_cached_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([8.0, 10.0, 11.0, 12.0])  # the request is made, and then its outputs come
    monkeypatch.setattr("inflight.engine.request.output_processor.time.monotonic", lambda: next(clock))
    processor = Processor(byte_tokenizer())
    processor.add_request(request(n=2))
    processor.process([output("0_r", [97], num_cached_tokens=16, queue_seconds=1.0)])
    processor.process([output("1_r", [97], FinishReason.LENGTH, num_cached_tokens=32, queue_seconds=1.5)])
    [result] = processor.process([output("0_r", [97], FinishReason.LENGTH, num_cached_tokens=16)]).request_outputs
    assert result.num_cached_tokens == 16
    assert result.metrics is not None
    assert result.metrics.arrival_time == 1.0
    assert (result.metrics.first_scheduled_time, result.metrics.first_token_time) == (9.0, 10.0)
    assert result.metrics.finished_time == 12.0


def test_cached_tokens_are_those_of_the_first_child() -> None:
    """The others share its prompt: no earlier request's."""
    for order in ("01", "10"):
        processor = Processor(byte_tokenizer())
        processor.add_request(request(n=2))
        cached = {"0": 0, "1": 32}
        for index in order:
            found = processor.process(
                [output(f"{index}_r", [97], FinishReason.LENGTH, num_cached_tokens=cached[index])]
            ).request_outputs
        assert [result.num_cached_tokens for result in found] == [0]


def test_without_a_tokenizer() -> None:
    processor = Processor(None)
    processor.add_request(request(logprobs=0))
    done = processor.process([output("r", [97], FinishReason.LENGTH, logprobs=columns([97], 0))])
    [completion] = done.request_outputs[0].outputs
    assert (completion.text, completion.token_ids) == ("", [97])
    assert completion.logprobs == [{97: Logprob(-97.5, 100, None)}]


def test_results_do_not_share_lists_with_the_processor() -> None:
    processor = Processor(byte_tokenizer())
    processor.add_request(request(), CUMULATIVE)
    [first] = processor.process([output("r", [97])]).request_outputs
    processor.process([output("r", [98])])
    assert first.outputs[0].token_ids == [97]
    assert first.outputs[0].text == "a"


def num_done(sequence: EngineCoreRequest) -> int | None:
    return next((part.num_done for part in sequence.parts if isinstance(part, PromptLogprobsPart)), None)


def test_a_resumed_request_brings_what_its_caller_has() -> None:
    processor = OutputProcessor(None)
    processed = request("r", [1, 2, 3, 4], n=2, temperature=1.0, prompt_logprobs=0, detokenize=False)
    state = processor.add_request(processed, RequestOutputKind.DELTA)
    assert all(sent is made for sent, made in zip(state.resumed_sequences(), processed.sequences, strict=True))
    first, second = (sequence.request_id for sequence in processed.sequences)
    piece = EngineCoreOutput(request_id=first, new_token_ids=(), parts=prompt_results(columns([2, 3], 0)))
    processor.update([piece])
    assert [num_done(sequence) for sequence in state.resumed_sequences()] == [3, None]
    processor.update([EngineCoreOutput(request_id=second, new_token_ids=(7, 8), num_cached_tokens=4)])
    assert state.take_output() is not None  # a delta takes the tokens away from its caller's view only
    rest = EngineCoreOutput(
        request_id=first, new_token_ids=(5,), parts=prompt_results(columns([4], 0), 3), num_cached_tokens=2
    )
    processor.update([rest])
    assert state.take_output() is not None
    found = state.resumed_sequences()
    assert [sequence.emitted_token_ids for sequence in found] == [(5,), (7, 8)]
    assert [num_done(sequence) for sequence in found] == [4, None]
    processor.update([EngineCoreOutput(request_id=first, new_token_ids=(6,), finish_reason=FinishReason.LENGTH)])
    assert [sequence.request_id for sequence in state.resumed_sequences()] == [second]
    assert state.num_cached_tokens == 2


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA, FINAL_ONLY])
def test_events_of_a_parser(kind: RequestOutputKind) -> None:
    """Only the new ones in a delta, otherwise all of them, with successive pieces joined."""
    processor = Processor(byte_tokenizer())
    parsed = replace(request(), make_parser=lambda: create_output_parser(None, "qwen3", tools=None))
    processor.add_request(parsed, kind)
    found: list[tuple[list[Event], int]] = []
    pieces = ["<think>", "so", " on", "</think>", "yes", " no"]
    for piece in pieces:
        ends = FinishReason.LENGTH if piece is pieces[-1] else None
        for result in processor.process([output("r", list(piece.encode()), ends)]).request_outputs:
            [completion] = result.outputs
            assert completion.events is not None and completion.text == ""
            found.append((list(completion.events), completion.num_reasoning_tokens))
    num_reasoning = len("so on</think")  # the token that completes the tag does not count
    if kind is not DELTA:
        assert found[-1] == ([ReasoningDelta("so on"), ContentDelta("yes no")], num_reasoning)
        assert len(found) == (1 if kind is FINAL_ONLY else len(pieces))
        return
    events = [event for new, _ in found for event in new]
    assert "".join(event.text for event in events if isinstance(event, ReasoningDelta)) == "so on"
    assert "".join(event.text for event in events if isinstance(event, ContentDelta)) == "yes no"
    assert sum(count for _, count in found) == num_reasoning
    assert found[0][0] == [] and found[-1][1] == 0


def test_losses_of_an_engine_are_counted_until_there_is_progress() -> None:
    processor = Processor(byte_tokenizer())
    state = processor.add_request(request(n=2), DELTA)
    assert state.num_losses == 0

    def lose(*token_ids: int) -> list[int]:
        """The counts after these tokens of the first sequence, and then a loss."""
        processor.process([output("0_r", list(token_ids))])
        state.count_loss()
        return [sequence.num_losses for sequence in state.resumed_sequences()]

    assert [lose(), lose(), lose(97)] == [[1, 1], [2, 2], [3, 3]]  # one token is no progress
    assert [lose(97), lose(97, 98), lose(97, 98, 99)] == [[4, 4], [1, 5], [1, 6]]
    assert state.num_losses == 6
    processor.process([output("1_r", [97], FinishReason.LENGTH)])
    assert (lose(), state.num_losses) == ([2], 2)
    processor.process([output("0_r", [97], FinishReason.LENGTH)])
    assert state.num_losses == 0
