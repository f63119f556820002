"""The manager: a request's life, errors of one among many, reasoning, drafts, the ring of buffers and the cache."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from inflight.errors import ConfigError, ErrorKind, OverloadedError
from inflight.fair_queue import FairQueue
from inflight.interface.request import AnswerFrame
from inflight.structured_output import grammar_cache, pace
from inflight.structured_output.backend import TOO_COMPLEX, CompiledGrammar, GrammarBackend
from inflight.structured_output.manager import MaskRequest, StructuredOutputManager
from inflight.structured_output.spec import GrammarSpec
from inflight.structured_output.thinking_budget import MOST_BEHIND_TEXT
from inflight.structured_outputs_params import StructuredOutputsParams
from tests.support.waits import wait_until
from tests.unit.structured_output.grammar_case import allowed_ids, backend, mask_of, tokenizer
from tests.unit.structured_output.slow_backend import SlowBackend

GRAMMAR = backend("embedded")
TOKENIZER = tokenizer("embedded")
YES_NO = StructuredOutputsParams(choice=["yes", "no"])
WORDS = StructuredOutputsParams(regex="[a-z]+")
DIGITS = StructuredOutputsParams(regex="[0-9]{4}-[0-9]{4}")
NO_EOS = [i for i in range(32 * ((GRAMMAR.vocab_size + 31) // 32)) if i not in GRAMMAR.eos_token_ids]
BLOW_UP = StructuredOutputsParams(regex="a{100000}")
THINK = AnswerFrame(begin="<think>", end="</think>")
INSIDE = AnswerFrame(begin="<think>", end="</think>", is_open=True)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@pytest.fixture
def manager() -> Iterator[StructuredOutputManager]:
    manager = StructuredOutputManager(lambda: GRAMMAR, GRAMMAR.vocab_size, num_buffers=2)
    yield manager
    manager.close()


def start(
    manager: StructuredOutputManager, request_id: str, params: StructuredOutputsParams, frame: AnswerFrame | None = None
) -> None:
    manager.submit(request_id, params, frame=frame).exception(timeout=300)


def advance(manager: StructuredOutputManager, request_id: str, token_ids: Sequence[int]) -> str:
    return next(filter(None, (manager.advance(request_id, token_id) for token_id in token_ids)), "")


def expected_mask(params: StructuredOutputsParams, token_ids: Sequence[int]) -> np.ndarray:
    matcher = GRAMMAR.compile(GrammarSpec.from_params(params)).matcher()
    assert matcher.accept_tokens(token_ids) == len(token_ids)
    return mask_of(matcher, GRAMMAR)


def test_it_compiles_off_the_loop() -> None:
    slow = SlowBackend()
    manager = StructuredOutputManager(lambda: slow, GRAMMAR.vocab_size, num_buffers=2)  # type: ignore[arg-type,return-value]
    try:
        futures = [manager.submit(request_id, YES_NO) for request_id in "abc"]
        assert not any(future.done() for future in futures)
        assert [manager.failure(request_id) for request_id in "abc"] == [""] * 3
        assert set(manager.fill([MaskRequest("a", [])]).masks.ravel()) == {-1}
        woken = threading.Event()
        futures[0].add_done_callback(lambda _: woken.set())
        manager.drop("c")
        slow.gate.set()
        assert woken.wait(timeout=300)
        assert all(future.done() for future in futures)
        assert [manager.failure(request_id) for request_id in "ab"] == [""] * 2
        assert len(slow.compiled) == 1
    finally:
        slow.gate.set()
        manager.close()


def test_a_grammar_that_only_dropped_requests_wanted_is_not_compiled() -> None:
    slow = SlowBackend()
    manager = StructuredOutputManager(lambda: slow, GRAMMAR.vocab_size, num_buffers=2, num_threads=1)  # type: ignore[arg-type,return-value]
    try:
        manager.submit("running", YES_NO)
        futures = [manager.submit(request_id, DIGITS) for request_id in ("first child", "second child")]
        manager.drop("first child")
        assert not futures[0].cancelled()
        manager.drop("second child")
        assert futures[0].cancelled()
        slow.gate.set()
        manager.submit("again", DIGITS).result(timeout=300)
        assert len(slow.compiled) == 2
    finally:
        slow.gate.set()
        manager.close()


@pytest.mark.parametrize("frame", [None, THINK])
def test_a_request_that_gave_its_place_away_can_be_sent_again(
    frame: AnswerFrame | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_cache, "MAX_QUEUED_SHORT", 1)
    slow = SlowBackend()
    manager = StructuredOutputManager(lambda: slow, GRAMMAR.vocab_size, num_buffers=2, num_threads=1)  # type: ignore[arg-type,return-value]
    try:
        manager.submit("running", YES_NO, client="many")
        refused = manager.submit("newest", DIGITS, frame=frame, client="many")
        small = manager.submit("small", WORDS, client="other")
        refused.exception(timeout=300)
        assert manager.failure("newest")
        assert manager.failure_kind("newest") is ErrorKind.OVERLOAD
        slow.gate.set()
        small.result(timeout=300)
        assert not manager.failure("small")
        assert manager.failure_kind("small") is ErrorKind.REQUEST
        manager.drop("newest")
        manager.submit("newest", DIGITS, client="many").result(timeout=300)
    finally:
        slow.gate.set()
        manager.close()


def test_a_request_fails_whose_grammar_needs_too_much_time(
    manager: StructuredOutputManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "MAX_TOKEN_SECONDS", 0.0)
    monkeypatch.setattr(pace, "MAX_SLOW_TOKENS", 1)
    start(manager, "fast", DIGITS)
    assert not advance(manager, "fast", encode("1"))
    monkeypatch.setattr(manager.pace, "slow_seconds", 0.0)
    start(manager, "slow", DIGITS)
    assert not manager.advance("slow", encode("1")[0]), "its processor time is not known yet"
    assert manager.pace.slow
    manager.forced_tokens("slow", 9)
    masks = manager.fill([MaskRequest("slow")]).masks
    assert np.array_equal(masks[0], expected_mask(DIGITS, encode("1")))
    assert pace.TOO_SLOW in manager.advance("slow", encode("2")[0])
    assert manager.failure("slow")
    manager.drop("slow")
    assert not manager.pace.slow


def test_of_slow_masks_that_are_made_together_each_is_measured_next(
    manager: StructuredOutputManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(manager, "a", DIGITS)
    start(manager, "b", DIGITS)
    monkeypatch.setattr(manager.pace, "slow_seconds", 0.0)
    expected = expected_mask(DIGITS, ())
    for slow in ([], ["a", "b"]):
        rows = manager.fill([MaskRequest("a"), MaskRequest("b")]).masks
        assert all(np.array_equal(row, expected) for row in rows)
        assert sorted(manager.pace.slow) == slow


def bounded(budget: int) -> AnswerFrame:
    return replace(INSIDE, max_reasoning_tokens=budget, closing_token_ids=tuple(encode("</think>")))


def test_a_bound_for_the_reasoning_of_a_free_text(manager: StructuredOutputManager) -> None:
    manager.submit("first", None, frame=bounded(3)).result(timeout=300)
    for budget in range(9):  # nothing is compiled or prepared for other budgets
        assert manager.submit(f"{budget}", None, frame=bounded(budget)).done()
        assert manager.num_free(f"{budget}") == budget
    assert len(manager._readers) == 1
    assert manager.forced_tokens("0", 99) == encode("</think>")
    assert not manager.forced_tokens("1", 99)
    text = encode("one two three four five six")
    for i in range(3):
        assert manager.num_free("first") == 3 - i
        assert not advance(manager, "first", text[i : i + 1])
    closing = encode("</think>")
    assert manager.num_free("first") == 0
    assert manager.forced_tokens("first", 1) == closing[:1]
    rows = manager.fill([MaskRequest("first", closing)]).masks
    assert [allowed_ids(row) for row in rows[:-1]] == [[token_id] for token_id in closing]
    assert set(rows[-1].tolist()) == {-1}
    assert not advance(manager, "first", [*closing, *text])
    assert manager.num_free("first") == MOST_BEHIND_TEXT and not manager.forced_tokens("first", 99)
    assert not manager.has_ended("first")
    manager.submit("resumed", None, frame=bounded(3), emitted_token_ids=text[:2]).result(timeout=300)
    assert manager.num_free("resumed") == 1
    assert advance(manager, "0", text[:1])  # another token than the closing one
    for name in ("first", "resumed", *map(str, range(9))):
        manager.drop(name)
    manager.check_integrity([])


def test_a_grammar_that_cannot_be_compiled_fails_its_request(manager: StructuredOutputManager) -> None:
    start(manager, "bad", StructuredOutputsParams(regex="("))
    start(manager, "good", YES_NO)
    assert manager.failure("bad").startswith("regex: ") and manager.failure_param("bad") == "regex"
    assert manager.failure("good") == manager.failure_param("good") == ""
    filled = manager.fill([MaskRequest("bad", []), MaskRequest("good", [])])
    assert set(filled.masks[0]) == {-1}
    np.testing.assert_array_equal(filled.masks[1], expected_mask(YES_NO, []))


def test_a_backend_that_cannot_be_made_fails_the_request() -> None:
    def create() -> GrammarBackend:
        raise ConfigError("no such package")

    manager = StructuredOutputManager(create, 100, num_buffers=1)
    try:
        start(manager, "a", YES_NO)
        assert manager.failure("a") == "no such package"
    finally:
        manager.close()


def test_a_request_without_a_place_in_the_queue_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FairQueue, "is_full_for", lambda *_: True)
    manager = StructuredOutputManager(lambda: GRAMMAR, 100, num_buffers=1)
    try:
        with pytest.raises(OverloadedError, match="too many grammars wait"):
            manager.submit("a", YES_NO)
        manager.check_integrity([])
        manager.drop("a")
    finally:
        manager.close()


def test_a_panic_of_a_library_is_not_quoted(caplog: pytest.LogCaptureFixture) -> None:
    class Panics(SlowBackend):
        def compile(self, spec: GrammarSpec) -> CompiledGrammar:
            raise PanicError("index 16383 out of bounds at /build/src/lexer.rs:12")

    manager = StructuredOutputManager(lambda: cast("GrammarBackend", Panics()), 100, num_buffers=1)
    try:
        start(manager, "a", YES_NO)
        assert manager.failure("a") == f"choice: {TOO_COMPLEX}"
        assert "lexer.rs:12" in caplog.text
    finally:
        manager.close()


class PanicError(BaseException):
    """As pyo3's PanicException, which is no `Exception`."""


def test_a_whole_life(manager: StructuredOutputManager) -> None:
    start(manager, "a", DIGITS)
    rng = random.Random(0)
    emitted: list[int] = []
    while True:
        filled = manager.fill([MaskRequest("a", [])])
        assert len(filled.masks) == 1
        assert not filled.errors
        np.testing.assert_array_equal(filled.masks[0], expected_mask(DIGITS, emitted))
        token_id = rng.choice(allowed_ids(filled.masks[0]))
        assert manager.advance("a", token_id) == ""
        emitted.append(token_id)
        if token_id in GRAMMAR.eos_token_ids:
            break
    text = TOKENIZER.decode(emitted[:-1])
    assert len(text) == 9
    assert text[4] == "-"
    manager.check_integrity(["a"])
    manager.drop("a")
    manager.drop("a")
    manager.check_integrity([])
    assert set(manager.fill([MaskRequest("a", [5])]).masks.ravel()) == {-1}


def test_rows_of_many_requests_with_drafts(manager: StructuredOutputManager) -> None:
    start(manager, "a", DIGITS)
    start(manager, "b", YES_NO)
    start(manager, "c", YES_NO, INSIDE)
    drafts = encode("1234")
    filled = manager.fill(
        [MaskRequest("c", [7, 7]), MaskRequest("a", drafts), MaskRequest("gone", [1, 2, 3]), MaskRequest("b", [])]
    )
    assert len(filled.masks) == 3 + (len(drafts) + 1) + 4 + 1
    assert all(allowed_ids(row) == NO_EOS for row in filled.masks[:3])
    for i in range(len(drafts) + 1):
        np.testing.assert_array_equal(filled.masks[3 + i], expected_mask(DIGITS, drafts[:i]))
    assert set(filled.masks[4 + len(drafts) : -1].ravel()) == {-1}
    np.testing.assert_array_equal(filled.masks[-1], expected_mask(YES_NO, []))
    np.testing.assert_array_equal(
        manager.fill([MaskRequest("a", [])]).masks[0], expected_mask(DIGITS, [])
    )  # nothing was committed


def test_a_token_that_is_not_admitted_is_an_error_of_its_request(manager: StructuredOutputManager) -> None:
    start(manager, "a", YES_NO)
    start(manager, "b", YES_NO)
    no = encode("no")
    error = advance(manager, "a", [*no, 77])
    assert error == f"the grammar failed after {len(no)} tokens: it does not admit token 77"
    assert manager.failure("a") == error
    filled = manager.fill([MaskRequest("a", []), MaskRequest("b", [])])
    assert set(filled.masks[0]) == {-1}
    np.testing.assert_array_equal(filled.masks[1], expected_mask(YES_NO, []))
    assert not filled.errors
    assert manager.forced_tokens("a", 5) == []


def test_a_grammar_that_fails_in_a_mask_is_named(manager: StructuredOutputManager) -> None:
    start(manager, "bad", BLOW_UP)
    start(manager, "good", YES_NO)
    assert manager.failure("bad") == ""
    letter = encode("a")
    filled = manager.fill([MaskRequest("good", []), MaskRequest("bad", [*letter, *letter]), MaskRequest("good2", [])])
    assert list(filled.errors) == ["bad"]
    assert filled.errors["bad"].startswith("the grammar failed after 0 tokens: ")
    assert manager.failure("bad") != ""
    assert set(filled.masks[1:].ravel()) == {-1}
    np.testing.assert_array_equal(filled.masks[0], expected_mask(YES_NO, []))


def test_a_mask_that_admits_nothing_is_an_error() -> None:
    class DeadEnd(type(GRAMMAR)):  # type: ignore[misc]
        def fill_masks(self, jobs: Any, rows: Any) -> None:
            super().fill_masks(jobs, rows)
            rows[jobs[0].first_row] = 0
            rows[jobs[1].first_row + 1] = 0

    grammar = DeadEnd(TOKENIZER, GRAMMAR.vocab_size, sorted(GRAMMAR.eos_token_ids))
    manager = StructuredOutputManager(lambda: grammar, GRAMMAR.vocab_size, num_buffers=1)
    try:
        for request_id in "ab":
            start(manager, request_id, YES_NO)
        filled = manager.fill([MaskRequest("a", []), MaskRequest("b", encode("yes"))])
        assert filled.errors == {"a": "the grammar failed after 0 tokens: it admits no token here"}
        assert filled.masks.any(axis=1).all()
        assert manager.failure("b") == ""
    finally:
        manager.close()


def test_the_grammar_starts_behind_the_end_of_thinking(manager: StructuredOutputManager) -> None:
    start(manager, "a", YES_NO, INSIDE)
    for token_id in encode("a </thin b"):
        assert manager.advance("a", token_id) == ""
        assert allowed_ids(manager.fill([MaskRequest("a", [])]).masks[0]) == NO_EOS
        assert manager.forced_tokens("a", 3) == []
    end, yes = encode("</think>"), encode("yes")
    # drafts that end the thinking, those behind it, and behind one that is not admitted
    filled = manager.fill([MaskRequest("a", [*end, *yes, 77, 5])])
    for i in range(len(end)):
        assert not GRAMMAR.eos_token_ids & set(allowed_ids(filled.masks[i]))
    for i in range(len(yes) + 1):
        np.testing.assert_array_equal(filled.masks[len(end) + i], expected_mask(YES_NO, yes[:i]))
    assert set(filled.masks[len(end) + len(yes) + 1 :].ravel()) == {-1}
    assert allowed_ids(manager.fill([MaskRequest("a", [])]).masks[0]) == NO_EOS  # nothing was committed
    assert advance(manager, "a", [*end, *yes[:1]]) == ""
    np.testing.assert_array_equal(manager.fill([MaskRequest("a", [])]).masks[0], expected_mask(YES_NO, yes[:1]))
    assert advance(manager, "a", end) != ""  # a second end is no text


def test_a_text_begins_with_thinking_or_with_the_constrained_text(manager: StructuredOutputManager) -> None:
    opening, yes = encode("<think>"), encode("yes")
    for request_id in "ab":
        start(manager, request_id, YES_NO, THINK)
    plain = manager.fill([MaskRequest("a", [])]).masks.copy()
    for drafts in (yes[:1], yes, opening[:1]):
        manager.fill([MaskRequest("a", drafts)])
        np.testing.assert_array_equal(manager.fill([MaskRequest("a", [])]).masks, plain)  # nothing was committed
    first = manager.fill([MaskRequest("a", opening)]).masks
    wanted = set(allowed_ids(expected_mask(YES_NO, [])))
    assert wanted < set(allowed_ids(first[0]))
    assert {TOKENIZER.decode_token(token_id) for token_id in set(allowed_ids(first[0])) - wanted} == {"<"}
    assert {TOKENIZER.decode_token(token_id) for token_id in allowed_ids(first[1])} == {"t", "th", "thin", "think"} & {
        TOKENIZER.decode_token(token_id) for token_id in range(TOKENIZER.vocab_size)
    }
    assert allowed_ids(first[-1]) == NO_EOS
    assert advance(manager, "a", yes) == ""
    np.testing.assert_array_equal(manager.fill([MaskRequest("a", [])]).masks[0], expected_mask(YES_NO, yes))
    assert advance(manager, "b", [*opening, *yes]) == ""
    assert allowed_ids(manager.fill([MaskRequest("b", [])]).masks[0]) == NO_EOS
    assert not manager.has_ended("b")
    assert advance(manager, "b", [*encode("</think>"), *yes, 2]) == ""
    assert manager.has_ended("b")


def test_a_tag_that_the_constrained_text_may_begin_like(manager: StructuredOutputManager) -> None:
    """Both are followed until one of them is certain; the tag wins."""
    params = StructuredOutputsParams(regex="<thi(ng|nk>x)")
    for request_id, text in (("a", "<thing"), ("b", "<think>x"), ("c", "<think>x</think><thing")):
        start(manager, request_id, params, THINK)
        spelled = [token_id for letter in text for token_id in encode(letter)]
        assert advance(manager, request_id, spelled) == "", text
        allowed = set(allowed_ids(manager.fill([MaskRequest(request_id, [])]).masks[0]))
        assert (2 in allowed) is (request_id != "b")


def test_white_space_after_the_thinking(manager: StructuredOutputManager) -> None:
    """JSON may have it; a regular expression, a choice or a grammar describes the text to the character."""
    for request_id, params, is_allowed in (
        ("a", StructuredOutputsParams(json_object=True), True),
        ("b", YES_NO, False),
    ):
        start(manager, request_id, params, INSIDE)
        assert advance(manager, request_id, encode("</think>")) == ""
        blank = encode("\n")
        allowed = allowed_ids(manager.fill([MaskRequest(request_id, [])]).masks[0])
        assert (blank[0] in allowed) is is_allowed
        assert (manager.advance(request_id, blank[0]) == "") is is_allowed
    for _ in range(63):
        assert manager.advance("a", blank[0]) == ""
    assert manager.advance("a", blank[0]) != "", "at most 64 characters"


def test_a_call_instead_of_the_constrained_text(manager: StructuredOutputManager) -> None:
    frame = AnswerFrame(begin="<think>", end="</think>", calls=("<tool_call>",))
    for request_id, text in (("a", "<tool_call>"), ("b", "<think>so</think><tool_call>"), ("c", "<tool")):
        start(manager, request_id, StructuredOutputsParams(json_object=True), frame)
        assert advance(manager, request_id, encode(text)) == ""
    rows = manager.fill([MaskRequest(request_id, []) for request_id in "abc"]).masks
    assert set(rows[:2].ravel()) == {-1}
    assert not GRAMMAR.eos_token_ids & set(allowed_ids(rows[2]))
    assert advance(manager, "a", [*encode("anything"), 2]) == ""
    assert not manager.has_ended("a"), "the end token ends the text, not the grammar"


def test_a_text_of_messages(manager: StructuredOutputManager) -> None:
    """As gpt-oss: the answer has a header, and after the reasoning comes nothing but this header or more reasoning."""
    frame = AnswerFrame(begin="<a>", end="<e>", answer="<f>", next_message="<s>", not_in_reasoning=("<s>", "<f>"))

    def state(request_id: str, text: str) -> set[int]:
        start(manager, request_id, YES_NO, frame)
        assert advance(manager, request_id, [token_id for letter in text for token_id in encode(letter)]) == "", text
        found = set(allowed_ids(manager.fill([MaskRequest(request_id, [])]).masks[0]))
        manager.drop(request_id)
        return found

    yes = set(allowed_ids(expected_mask(YES_NO, [])))
    assert state("a", "") > yes, "also the beginnings of the headers"
    assert state("b", "<f>") == state("c", "<a>Hm.<e><s><f>") == state("d", "<a><e><s><a><e><s><f>") == yes
    bracket = encode(">")[0]
    assert bracket not in state("e", "<a>Hm. <s"), "another message would begin"
    assert bracket in state("e", "<a>Hm. <e") and bracket in state("e", "<a>Hm. <x")
    assert state("g", "<a>Hm.<e>") == state("g", "<a><e>") and not state("g", "<a>Hm.<e>") & yes
    assert not state("i", "<a>Hm.") & GRAMMAR.eos_token_ids


def test_forced_tokens(manager: StructuredOutputManager) -> None:
    schema = {"type": "object", "properties": {"answer": {"enum": ["yes", "no"]}}, "required": ["answer"]}
    schema |= {"additionalProperties": False}
    start(manager, "a", StructuredOutputsParams(json=schema, disable_any_whitespace=True))
    forced = manager.forced_tokens("a", 100)
    assert TOKENIZER.decode(forced).startswith('{"answer":')
    assert manager.forced_tokens("a", 2) == forced[:2]
    start(manager, "b", StructuredOutputsParams(json=schema, disable_any_whitespace=True))
    assert advance(manager, "b", [forced[0], GRAMMAR.vocab_size - 1]) != ""
    assert manager.forced_tokens("b", 100) == [], "a request that has failed is not gone on with"
    assert advance(manager, "a", forced) == ""
    assert manager.forced_tokens("a", 100) == []


def test_tokens_that_were_forced_since_the_plan_are_drawn_again(manager: StructuredOutputManager) -> None:
    """The masks are those of the row's own positions: first the known tokens, each alone, then what follows them."""
    start(manager, "a", DIGITS)
    digits = encode("123")
    assert advance(manager, "a", digits) == ""
    for drafts in ([], digits[1:2], digits[1:], [*digits[1:], *encode("4")], [7, 7, 7]):
        filled = manager.fill([MaskRequest("a", drafts, digits[1:])])
        assert len(filled.masks) == len(drafts) + 1
        for row, token_id in zip(filled.masks, digits[1:], strict=False):
            assert allowed_ids(row) == [token_id]
        if len(drafts) >= 2:
            np.testing.assert_array_equal(filled.masks[2], expected_mask(DIGITS, digits))


def test_known_tokens_of_one_request_leave_the_rows_of_others(manager: StructuredOutputManager) -> None:
    for request_id in "abc":
        start(manager, request_id, DIGITS)
    one = encode("1")
    assert advance(manager, "b", one) == ""
    rows = [MaskRequest("a"), MaskRequest("b", encode("2"), one), MaskRequest("c", one), MaskRequest("b", [], one)]
    masks = manager.fill(rows).masks
    assert allowed_ids(masks[1]) == allowed_ids(masks[5]) == one
    for row, token_ids in ((0, []), (3, []), (4, one)):
        np.testing.assert_array_equal(masks[row], expected_mask(DIGITS, token_ids))


def test_a_closed_manager_compiles_nothing_more() -> None:
    slow = SlowBackend()
    manager = StructuredOutputManager(lambda: slow, GRAMMAR.vocab_size, num_buffers=2, num_threads=1)  # type: ignore[arg-type,return-value]
    running, queued = manager.submit("running", YES_NO), manager.submit("queued", DIGITS)
    closing = threading.Thread(target=manager.close)
    closing.start()
    wait_until(queued.cancelled)
    slow.gate.set()
    closing.join()
    assert running.done() and len(slow.compiled) == 1
    manager.check_integrity([])


def test_a_buffer_is_reused_only_after_the_whole_ring() -> None:
    manager = StructuredOutputManager(lambda: GRAMMAR, GRAMMAR.vocab_size, num_buffers=3)
    try:
        start(manager, "a", DIGITS)
        kept = []
        emitted: list[int] = []
        for i, token_id in enumerate(encode("12345"[:4])):
            filled = manager.fill([MaskRequest("a", [0] * (i % 2))])
            kept.append((filled.masks, filled.masks.copy()))
            for masks, copy in kept[-3:]:
                np.testing.assert_array_equal(masks, copy)
            manager.advance("a", token_id)
            emitted.append(token_id)
        first = manager.fill([MaskRequest("a", [])]).masks
        for _ in range(2):
            assert not np.shares_memory(first, manager.fill([MaskRequest("a", [])]).masks)
        assert np.shares_memory(first, manager.fill([MaskRequest("a", [])]).masks)
        assert manager.fill([]).masks.shape == (0, first.shape[1])
    finally:
        manager.close()


@pytest.mark.parametrize(("frame", "text"), [(None, "123"), (THINK, "123"), (THINK, "<think>4</think>123")])
def test_the_grammar_of_a_resumed_request_goes_on_after_its_emitted_tokens(
    manager: StructuredOutputManager, frame: AnswerFrame | None, text: str
) -> None:
    emitted, token_ids = encode("123"), encode(text)
    for request_id in "ab":  # the second grammar is in the cache
        manager.submit(request_id, DIGITS, frame=frame, emitted_token_ids=token_ids).result(timeout=300)
        assert manager.failure(request_id) == ""
        assert (manager.fill([MaskRequest(request_id)]).masks[0] == expected_mask(DIGITS, emitted)).all()


def test_a_resumed_request_whose_tokens_its_grammar_does_not_admit_fails(manager: StructuredOutputManager) -> None:
    manager.submit("a", DIGITS, emitted_token_ids=encode("12x")).result(timeout=300)
    assert "does not admit token" in manager.failure("a")
    manager.submit("b", BLOW_UP, emitted_token_ids=encode("a")).result(timeout=300)
    assert TOO_COMPLEX in manager.failure("b")
