"""`OutputProcessor`: the same result however tokens arrive, and what ends a request."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.engine.request.request_state import RequestOutputKind
from inflight.errors import InvalidRequestError
from inflight.interface.request import FinishReason
from inflight.interface.statistics import SchedulerStats
from inflight.metrics.observer import EngineObserver, FinishedRequest
from inflight.outputs import RequestOutput
from tests.support.fakes_tokenizer import BYTE_VOCAB_SIZE, EOS, EOS_ID, byte_tokenizer
from tests.unit.engine.request.output_cases import (
    CUMULATIVE,
    DELTA,
    FINAL_ONLY,
    Processor,
    columns,
    feed,
    output,
    request,
    without_times,
)

ids = st.lists(
    st.one_of(st.sampled_from(list(b"ab\xc3\xa9")), st.integers(0, BYTE_VOCAB_SIZE)), min_size=1, max_size=25
)
cuts = st.lists(st.integers(0, 6), max_size=8)


@given(
    ids,
    cuts,
    st.lists(st.sampled_from(["ab", "b", "é", "aab"]), max_size=2),
    st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
    st.sampled_from([None, 0, 2]),
    st.booleans(),
    st.integers(0, 5),
)
def test_the_result_does_not_depend_on_the_cuts(
    token_ids: list[int],
    sizes: list[int],
    stop: list[str],
    finish: FinishReason,
    logprobs: int | None,
    include: bool,
    min_tokens: int,
) -> None:
    def run(kind: RequestOutputKind, pieces: list[int]) -> list[RequestOutput]:
        processor = Processor(byte_tokenizer())
        params: dict[str, Any] = {"logprobs": logprobs, "include_stop_str_in_output": include, "min_tokens": min_tokens}
        processor.add_request(request(stop=stop, max_tokens=99, **params), kind)
        results = feed(processor, "r", token_ids, pieces, finish, num_logprobs=None if logprobs is None else 3)
        assert not processor.has_unfinished_requests()
        assert [result.finished for result in results] == [False] * (len(results) - 1) + [True]
        return [without_times(result) for result in results]

    [whole] = run(FINAL_ONLY, [])
    assert run(FINAL_ONLY, sizes) == [whole]
    cumulative = run(CUMULATIVE, sizes)
    assert cumulative[-1] == whole
    texts = [result.outputs[0].text for result in cumulative]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    deltas = [result.outputs[0] for result in run(DELTA, sizes)]
    [final] = whole.outputs
    assert "".join(delta.text for delta in deltas) == final.text
    assert [token_id for delta in deltas for token_id in delta.token_ids] == final.token_ids
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (final.finish_reason, final.stop_reason)
    assert deltas[-1].cumulative_logprob == final.cumulative_logprob
    if logprobs is not None:
        assert [row for delta in deltas for row in delta.logprobs or []] == final.logprobs
        assert len(final.logprobs or []) == len(final.token_ids)
    if not stop:
        text_ids = token_ids[:-1] if finish is FinishReason.STOP and not include else token_ids
        assert final.text == byte_tokenizer().decode(text_ids)
        assert final.token_ids == token_ids


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=30))
def test_children_come_in_order_whatever_the_order_of_their_tokens(schedule: list[tuple[int, int]]) -> None:
    processor = Processor(byte_tokenizer())
    processor.add_request(request(n=3))
    left = {index: [97 + index] * 6 for index in range(3)}
    results: list[RequestOutput] = []
    for index, count in [*schedule, (2, 6), (0, 6), (1, 6)]:
        if not left[index]:
            continue
        piece, left[index] = left[index][:count], left[index][count:]
        finish = None if left[index] else FinishReason.LENGTH
        results += processor.process([output(f"{index}_r", piece, finish)]).request_outputs
    [result] = results
    assert [completion.index for completion in result.outputs] == [0, 1, 2]
    assert [completion.text for completion in result.outputs] == ["aaaaaa", "bbbbbb", "cccccc"]
    assert result.finished


def test_a_stop_string_aborts_the_child_and_later_tokens_do_not_count() -> None:
    processor = Processor(byte_tokenizer())
    processor.add_request(request(stop=["END"], logprobs=0))
    first = processor.process([output("r", list(b"xE"), logprobs=columns(list(b"xE"), 0))])
    assert (first.request_outputs, first.requests_to_abort) == ([], [])
    second = processor.process([output("r", list(b"NDyz"), logprobs=columns(list(b"NDyz"), 0))])
    assert second.requests_to_abort == ["r"]
    [completion] = second.request_outputs[0].outputs
    assert (completion.text, completion.token_ids) == ("x", list(b"xEND"))
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "END")
    assert len(completion.logprobs or []) == 4
    late = processor.process([output("r", [1, 2], FinishReason.LENGTH)])
    assert (late.request_outputs, late.requests_to_abort) == ([], [])


def test_a_stop_string_in_the_cores_last_output_needs_no_abort() -> None:
    processor = Processor(byte_tokenizer())
    processor.add_request(request(stop=["E"]))
    result = processor.process([output("r", list(b"aEb"), FinishReason.LENGTH)])
    assert result.requests_to_abort == []
    [completion] = result.request_outputs[0].outputs
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("a", "stop", "E")


def test_one_child_may_stop_before_the_others() -> None:
    processor = Processor(byte_tokenizer())
    processor.add_request(request(n=2, stop=["b"]), DELTA)
    result = processor.process([output("0_r", [97]), output("1_r", [98])])
    assert result.requests_to_abort == ["1_r"]
    assert [(c.index, c.text, c.finish_reason) for c in result.request_outputs[0].outputs] == [
        (0, "a", None),
        (1, "", "stop"),
    ]
    assert not result.request_outputs[0].finished
    result = processor.process([output("0_r", [97], FinishReason.LENGTH)])
    assert [(c.index, c.text) for c in result.request_outputs[0].outputs] == [(0, "a")]
    assert result.request_outputs[0].finished


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, f"a{EOS}")])
def test_a_stop_tokens_text(include: bool, text: str) -> None:
    processor = Processor(byte_tokenizer())
    processor.add_request(request(include_stop_str_in_output=include, skip_special_tokens=False))
    done = processor.process([output("r", [97, EOS_ID], FinishReason.STOP, stop_reason=EOS_ID)])
    [completion] = done.request_outputs[0].outputs
    assert (completion.text, completion.token_ids, completion.stop_reason) == (text, [97, EOS_ID], EOS_ID)
    assert completion.finish_reason == "stop"


def test_a_stop_tokens_text_is_not_searched() -> None:
    processor = Processor(byte_tokenizer())
    processor.add_request(request(stop=["b"]))
    done = processor.process([output("r", list(b"ab"), FinishReason.STOP, stop_reason=98)])
    assert (done.request_outputs[0].outputs[0].text, done.request_outputs[0].outputs[0].stop_reason) == ("a", 98)


def test_abort() -> None:
    processor = Processor(byte_tokenizer())
    processor.add_request(request("p", n=2))
    processor.add_request(request("q"), DELTA)
    processor.process([output("0_p", [97], FinishReason.LENGTH), output("1_p", [98]), output("q", [0xC3])])
    result = processor.abort(["p", "unknown", "q", "p"])
    assert result.requests_to_abort == ["1_p", "q"]
    p, q = (state.take_output() for state in result.changed)
    assert [(c.text, c.finish_reason) for c in p.outputs] == [("a", "length"), ("b", "abort")]
    assert [(c.text, c.token_ids, c.finish_reason) for c in q.outputs] == [("�", [], "abort")]
    assert p.finished
    assert q.finished
    assert not processor.has_unfinished_requests()
    assert processor.abort(["p"]).changed == []
    assert processor.process([output("1_p", [98])]).request_outputs == []


def test_abort_before_the_first_token() -> None:
    processor = Processor(byte_tokenizer())
    processor.add_request(request(logprobs=1))
    [state] = processor.abort(["r"]).changed
    result = state.take_output()
    [completion] = result.outputs
    assert (completion.text, completion.token_ids, completion.logprobs, completion.cumulative_logprob) == (
        "",
        [],
        [],
        0.0,
    )
    assert result.metrics is None


def test_an_error_ends_its_request_only() -> None:
    processor = Processor(byte_tokenizer())
    processor.add_request(request("p"))
    processor.add_request(request("q"))
    result = processor.process(
        [output("p", [], FinishReason.ERROR, error="too large", error_param="regex"), output("q", [97])]
    )
    assert [(output.error, output.error_param) for output in result.request_outputs] == [("too large", "regex")]
    assert result.requests_to_abort == []
    assert [(r.request_id, r.outputs[0].finish_reason) for r in result.request_outputs] == [("p", "error")]
    assert processor.has_unfinished_requests()


def test_an_id_is_free_again_when_its_request_has_ended() -> None:
    processor = Processor(byte_tokenizer())
    processor.add_request(request())
    with pytest.raises(InvalidRequestError, match="'r' is still running"):
        processor.add_request(request())
    processor.process([output("r", [97], FinishReason.LENGTH)])
    processor.add_request(request())


class Counting(EngineObserver):
    """Counts tokens; `raises` is against its contract."""

    def __init__(self, *, raises: bool = False) -> None:
        self.num_tokens = self.num_finished = 0
        self.raises = raises

    def stats_changed(self, stats: SchedulerStats) -> None:
        self._add(0)

    def first_token(self, seconds: float) -> None:
        self._add(1)

    def tokens_generated(self, count: int, seconds: float | None) -> None:
        self._add(count)

    def request_finished(self, request: FinishedRequest) -> None:
        self.num_finished += 1

    def _add(self, count: int) -> None:
        if self.raises:
            raise ZeroDivisionError("a defect")
        self.num_tokens += count


def test_observers_hear_of_every_token_once_and_of_no_other() -> None:
    observer = Counting()
    processor = Processor(byte_tokenizer(), [observer])
    processor.add_request(request(n=4))
    processor.process([output("0_r", [97])])
    processor.process([output("1_r", [97, 98, 99])])
    processor.process([output("1_r", [97]), output("0_r", [98, 99])])
    processor.abort(["r"])
    assert (observer.num_tokens, observer.num_finished) == (7, 1)


def test_an_observer_that_raises_costs_nobody_anything(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Counting(raises=True), Counting()
    processor = Processor(byte_tokenizer(), [bad, good])
    processor.add_request(request(), FINAL_ONLY)
    processor.process([output("r", [97])])
    [found] = processor.process([output("r", [98], FinishReason.LENGTH)]).request_outputs
    assert (found.outputs[0].text, found.outputs[0].finish_reason) == ("ab", "length")
    assert (good.num_tokens, good.num_finished, bad.num_finished) == (2, 1, 1)
    assert len([record for record in caplog.records if "Counting raised" in record.message]) == 1


def test_a_request_whose_tokens_cannot_be_taken_in_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    processor = Processor(byte_tokenizer())
    for name in "abc":
        processor.add_request(request(name, logprobs=1 if name == "b" else None), CUMULATIVE)
    outputs = [output(name, [97]) for name in "abc"]  # that of b lacks its log-probabilities
    result = processor.process(outputs)
    texts = {found.request_id: found.outputs[0].text for found in result.request_outputs}
    assert texts["a"] == texts["c"] == "a"
    [failed] = [found for found in result.request_outputs if found.finished]
    assert (failed.request_id, failed.outputs[0].finish_reason) == ("b", "error")
    assert "AssertionError" in failed.error and failed.error_kind == "engine"
    assert "left out log-probabilities" in caplog.text
    assert result.requests_to_abort == ["b"]
    assert processor.request_ids() == ["a", "c"]
    assert not processor.process([output("b", [97])]).request_outputs


def test_an_abort_ends_all_though_the_text_of_one_has_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = Processor(byte_tokenizer())
    states = [processor.add_request(request(name)) for name in "abc"]

    def finish(end_token_id: int | None = None) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(states[0].completions[0]._detokenizer, "finish", finish)
    assert processor.abort("abc").requests_to_abort == ["a", "b", "c"]
    assert [state.completions[0].finish_reason for state in states] == ["error", "abort", "abort"]
    assert not processor.has_unfinished_requests()


def test_the_cached_tokens_are_those_that_the_first_sequence_found_at_first() -> None:
    """Its siblings find the prompt that it has computed, and a sequence that is resumed finds its own tokens."""
    for order in ((0, 1), (1, 0)):
        processor = Processor(None)
        state = processor.add_request(request(n=2))
        for index in order:
            processor.process([output(f"{index}_r", [97], num_cached_tokens=28 * index + 4)])
        processor.process([output(f"{index}_r", [98], num_cached_tokens=16) for index in order])
        assert state.num_cached_tokens == 4
