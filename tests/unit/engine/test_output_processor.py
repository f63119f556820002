"""`OutputProcessor`: the same result however tokens arrive, and what ends a request."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.engine.input_processor import ProcessedRequest
from inflight.engine.output_processor import OutputProcessor
from inflight.engine.request_state import RequestOutputKind
from inflight.errors import InvalidRequestError
from inflight.interface.request import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    LogprobsColumns,
    ResolvedSampling,
)
from inflight.interface.statistics import SchedulerStats
from inflight.metrics.observer import EngineObserver, FinishedRequest
from inflight.outputs import Logprob, RequestOutput
from inflight.sampling_params import SamplingParams
from tests.fakes_tokenizer import BYTE_VOCAB_SIZE, EOS, EOS_ID, byte_tokenizer

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


class Processor(OutputProcessor):
    def process(self, outputs: list[EngineCoreOutput]) -> SimpleNamespace:
        """What an engine does that hands outputs out at once."""
        update = self.update(outputs)
        return SimpleNamespace(request_outputs=update.take_outputs(), requests_to_abort=update.requests_to_abort)


def request(request_id: str = "r", prompt: list[int] | None = None, **params: Any) -> ProcessedRequest:
    prompt = prompt or [104, 105]
    sampling = ResolvedSampling(params=SamplingParams(**params), seed=0, max_tokens=99)
    n = sampling.params.n
    children = tuple(
        EngineCoreRequest(
            request_id=request_id if n == 1 else f"{index}_{request_id}",
            prompt_token_ids=np.array(prompt, dtype=np.int32),
            sampling=sampling,
            arrival_time=1.0,
        )
        for index in range(n)
    )
    return ProcessedRequest(
        request_id=request_id, prompt="hi", prompt_token_ids=prompt, params=sampling.params, arrival_time=1.0, children=children
    )  # fmt: skip


def columns(token_ids: list[int], k: int) -> LogprobsColumns:
    """Made-up log-probabilities, a function of the token alone."""
    top = [[token_id, *[(token_id + j) % BYTE_VOCAB_SIZE for j in range(k)]] for token_id in token_ids]
    return LogprobsColumns(
        token_ids=np.array(top, dtype=np.int32).reshape(-1, 1 + k),
        logprobs=np.array([[-0.5 - token_id, *range(0, -k, -1)] for token_id in token_ids], np.float32).reshape(
            -1, 1 + k
        ),
        ranks=np.array([token_id + 3 for token_id in token_ids], dtype=np.int32),
    )


def output(
    request_id: str, token_ids: list[int], finish: FinishReason | None = None, **fields: Any
) -> EngineCoreOutput:
    return EngineCoreOutput(request_id=request_id, new_token_ids=tuple(token_ids), finish_reason=finish, **fields)


def without_times(result: RequestOutput) -> RequestOutput:
    return replace(result, metrics=None)


def cut(token_ids: list[int], sizes: list[int]) -> list[list[int]]:
    """The tokens in pieces of these sizes (0 is an empty one), then one by one; the last piece is never empty."""
    pieces, done = [], 0
    for size in sizes:
        if done + size < len(token_ids):
            pieces.append(token_ids[done : done + size])
            done += size
    return pieces + [[token_id] for token_id in token_ids[done:]]


def feed(
    processor: Processor, child: str, token_ids: list[int], sizes: list[int], finish: FinishReason, **more: Any
) -> list[RequestOutput]:
    """Send the tokens in pieces, as a core would that learns late of an abort."""
    num_logprobs = more.pop("num_logprobs", None)
    pieces = cut(token_ids, sizes)
    results = []
    for i, piece in enumerate(pieces):
        found = processor.process(
            [
                output(
                    child,
                    piece,
                    finish if i == len(pieces) - 1 else None,
                    logprobs=None if num_logprobs is None else columns(piece, num_logprobs),
                    **more,
                )
            ]
        )
        results += found.request_outputs
    return results


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


# -- the end of a request ------------------------------------------------------------------------------------------------


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
    result = processor.process([output("p", [], FinishReason.ERROR, error="rank 0 is gone"), output("q", [97])])
    assert [output.error for output in result.request_outputs] == ["rank 0 is gone"]
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


# -- what a result holds -------------------------------------------------------------------------------------------------


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
    results = processor.process([output("r", [], prompt_logprobs=columns([98, 99], 2))]).request_outputs
    assert all(result.prompt_logprobs is None for result in results)
    results += processor.process([output("r", [1], prompt_logprobs=columns([100], 2))]).request_outputs
    results += processor.process([output("r", [2], FinishReason.LENGTH)]).request_outputs
    expected = [None, *({i: Logprob(-0.5 - i, i + 3, chr(i))} for i in (98, 99, 100))]
    found = [result.prompt_logprobs for result in results if result.prompt_logprobs is not None]
    assert found == [expected] * (2 if kind is CUMULATIVE else 1)


def test_metrics_and_cached_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 11.0, 12.0])
    monkeypatch.setattr("inflight.engine.output_processor.time.monotonic", lambda: next(clock))
    processor = Processor(byte_tokenizer())
    processor.add_request(request(n=2))
    processor.process([output("0_r", [97], num_cached_tokens=16, first_scheduled_time=9.0)])
    processor.process([output("1_r", [97], FinishReason.LENGTH, num_cached_tokens=32, first_scheduled_time=9.5)])
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
        for child in order:
            found = processor.process(
                [output(f"{child}_r", [97], FinishReason.LENGTH, num_cached_tokens=cached[child])]
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


# -- defects -----------------------------------------------------------------------------------------------------------


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
    assert "AssertionError" in failed.error
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


def test_a_resumed_request_brings_what_its_caller_has() -> None:
    processor = OutputProcessor(None)
    processed = request("r", [1, 2, 3, 4], n=2, temperature=1.0, prompt_logprobs=0, detokenize=False)
    state = processor.add_request(processed, RequestOutputKind.DELTA)
    assert state.resumed_children() == processed.children
    first, second = (child.request_id for child in processed.children)
    piece = EngineCoreOutput(request_id=first, new_token_ids=(), prompt_logprobs=columns([2, 3], 0))
    processor.update([piece])
    assert [child.num_prompt_logprobs_done for child in state.resumed_children()] == [3, 1]
    processor.update([EngineCoreOutput(request_id=second, new_token_ids=(7, 8), num_cached_tokens=4)])
    assert state.take_output() is not None  # a delta takes the tokens away from its caller's view only
    rest = EngineCoreOutput(request_id=first, new_token_ids=(5,), prompt_logprobs=columns([4], 0), num_cached_tokens=2)
    processor.update([rest])
    assert state.take_output() is not None
    found = state.resumed_children()
    assert [child.emitted_token_ids for child in found] == [(5,), (7, 8)]
    assert [child.num_prompt_logprobs_done for child in found] == [4, 1]
    processor.update([EngineCoreOutput(request_id=first, new_token_ids=(6,), finish_reason=FinishReason.LENGTH)])
    assert [child.request_id for child in state.resumed_children()] == [second]
    assert state.num_cached_tokens == 2
