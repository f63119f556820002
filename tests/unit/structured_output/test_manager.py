"""The manager: a request's life, errors of one among many, reasoning, drafts, the ring of buffers and the cache."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest

from inflight.errors import ConfigError
from inflight.sampling_params import StructuredOutputsParams
from inflight.structured_output import grammar_cache
from inflight.structured_output.backend import TOO_COMPLEX, CompiledGrammar, GrammarBackend
from inflight.structured_output.compile_lane import TOO_MANY_GRAMMARS
from inflight.structured_output.manager import MaskRequest, StructuredOutputManager
from inflight.structured_output.spec import GrammarSpec
from tests.unit.structured_output.grammar_case import allowed_ids, backend, mask_of, tokenizer
from tests.unit.structured_output.slow_backend import SlowBackend

GRAMMAR = backend("llguidance", "embedded")
TOKENIZER = tokenizer("embedded")
YES_NO = StructuredOutputsParams(choice=["yes", "no"])
DIGITS = StructuredOutputsParams(regex="[0-9]{4}-[0-9]{4}")
BLOW_UP = StructuredOutputsParams(regex="a{100000}")
MARKER = (3, 4)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@pytest.fixture
def manager() -> Iterator[StructuredOutputManager]:
    manager = StructuredOutputManager(lambda: GRAMMAR, GRAMMAR.vocab_size, num_buffers=2)
    yield manager
    manager.close()


def start(
    manager: StructuredOutputManager, request_id: str, params: StructuredOutputsParams, marker: Sequence[int] = ()
) -> None:
    manager.submit(request_id, params, reasoning_end_ids=marker).exception(timeout=30)


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
        assert woken.wait(timeout=30)
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
        manager.submit("again", DIGITS).result(timeout=30)
        assert len(slow.compiled) == 2
    finally:
        slow.gate.set()
        manager.close()


def test_a_grammar_that_cannot_be_compiled_fails_its_request(manager: StructuredOutputManager) -> None:
    start(manager, "bad", StructuredOutputsParams(regex="("))
    start(manager, "good", YES_NO)
    assert manager.failure("bad").startswith("regex: ")
    assert manager.failure("good") == ""
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


def test_a_request_without_a_place_in_the_queue_fails_with_words_that_the_front_end_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_cache, "MAX_QUEUED_SHORT", 0)
    manager = StructuredOutputManager(lambda: GRAMMAR, 100, num_buffers=1)
    try:
        start(manager, "a", YES_NO)
        assert manager.failure("a") == TOO_MANY_GRAMMARS
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
    start(manager, "c", YES_NO, MARKER)
    drafts = encode("1234")
    filled = manager.fill(
        [MaskRequest("c", [7, 7]), MaskRequest("a", drafts), MaskRequest("gone", [1, 2, 3]), MaskRequest("b", [])]
    )
    assert len(filled.masks) == 3 + (len(drafts) + 1) + 4 + 1
    assert set(filled.masks[:3].ravel()) == {-1}
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
    start(manager, "a", YES_NO, MARKER)
    for token_id in [9, 3, 9, 3, 3]:
        assert manager.advance("a", token_id) == ""
        assert set(manager.fill([MaskRequest("a", [])]).masks[0]) == {-1}
        assert manager.forced_tokens("a", 3) == []
    yes = encode("yes")
    # a draft that ends the marker, those behind it, and behind one that is not admitted
    filled = manager.fill([MaskRequest("a", [4, *yes, 77, 5])])
    assert set(filled.masks[0]) == {-1}
    for i in range(len(yes) + 1):
        np.testing.assert_array_equal(filled.masks[1 + i], expected_mask(YES_NO, yes[:i]))
    assert set(filled.masks[2 + len(yes) :].ravel()) == {-1}
    assert set(manager.fill([MaskRequest("a", [])]).masks[0]) == {-1}  # nothing was committed
    assert advance(manager, "a", [4, *yes[:1]]) == ""
    np.testing.assert_array_equal(manager.fill([MaskRequest("a", [])]).masks[0], expected_mask(YES_NO, yes[:1]))
    assert manager.advance("a", 3) != ""  # a second marker is no text


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


@pytest.mark.parametrize("marker", [(), MARKER])
def test_the_grammar_of_a_resumed_request_goes_on_after_its_emitted_tokens(
    manager: StructuredOutputManager, marker: tuple[int, ...]
) -> None:
    emitted = encode("123")
    token_ids = [9, *marker, *emitted] if marker else emitted
    for request_id in "ab":  # the second grammar is in the cache
        manager.submit(request_id, DIGITS, reasoning_end_ids=marker, emitted_token_ids=token_ids).result(timeout=30)
        assert manager.failure(request_id) == ""
        assert (manager.fill([MaskRequest(request_id)]).masks[0] == expected_mask(DIGITS, emitted)).all()


def test_a_resumed_request_whose_tokens_its_grammar_does_not_admit_fails(manager: StructuredOutputManager) -> None:
    manager.submit("a", DIGITS, emitted_token_ids=encode("12x")).result(timeout=30)
    assert "does not admit token" in manager.failure("a")
    manager.submit("b", BLOW_UP, emitted_token_ids=encode("a")).result(timeout=30)
    assert TOO_COMPLEX in manager.failure("b")
