"""`RequestGrammar`: why a grammar cannot be used, and what is allowed while a text may still become an answer or a thought."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import pytest

from inflight.errors import ConfigError, InvalidRequestError, TokenizerError
from inflight.interface.request import AnswerFrame
from inflight.structured_output import pace
from inflight.structured_output.answer_frame_reader import AnswerFrameReader
from inflight.structured_output.backend import CompiledGrammar, num_mask_words
from inflight.structured_output.manager import MaskRequest, StructuredOutputManager
from inflight.structured_output.request_grammar import RequestGrammar
from inflight.structured_output.spec import GrammarSpec
from inflight.structured_output.token_texts import TokenTexts
from inflight.structured_outputs_params import StructuredOutputsParams
from tests.unit.structured_output.grammar_case import allowed_ids, backend, tokenizer

GRAMMAR = backend("embedded")
TOKENIZER = tokenizer("embedded")
EOS = min(GRAMMAR.eos_token_ids)
THINK = AnswerFrame(begin="<think>", end="</think>", calls=("<call>",))
LIKE_THINK = StructuredOutputsParams(regex="<thi(ng|nk>x)")  # begins as the tag of the reasoning does


def spelled(text: str) -> list[int]:
    return [token_id for letter in text for token_id in TOKENIZER.encode(letter, add_special_tokens=False)]


def request_grammar(params: StructuredOutputsParams, frame: AnswerFrame | None = None) -> RequestGrammar:
    spec = GrammarSpec.from_params(params)
    future: Future[CompiledGrammar] = Future()
    future.set_result(GRAMMAR.compile(spec))
    grammar = RequestGrammar(spec, future, has_frame=frame is not None)
    if frame is not None:
        texts = TokenTexts(GRAMMAR.vocabulary_bytes(), GRAMMAR.vocab_size, GRAMMAR.eos_token_ids)
        assert not grammar.is_ready
        grammar.read_frame(AnswerFrameReader(frame, texts, keeps_blanks=True))
    assert grammar.is_ready
    return grammar


def masks(grammar: RequestGrammar, drafts: Sequence[int]) -> list[list[int]]:
    rows = np.full((len(drafts) + 1, num_mask_words(GRAMMAR.vocab_size)), 0x5A5A5A5A, dtype=np.int32)
    assert grammar.fill(drafts, rows) == ""
    return [allowed_ids(row) for row in rows]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InvalidRequestError("regex: bad"), "regex: bad"),
        (ConfigError("no package"), "no package"),
        (TokenizerError("no bytes"), "no bytes"),
        (OSError("gone"), "the grammar could not be compiled: OSError: gone"),
        (None, "the engine was closed"),
    ],
)
def test_why_a_compilation_has_failed(error: Exception | None, expected: str) -> None:
    future: Future[CompiledGrammar] = Future()
    grammar = RequestGrammar(GrammarSpec("regex", "a"), future, has_frame=False)
    assert (grammar.failure, grammar.is_ready) == ("", False)
    if error is None:
        future.cancel()
    else:
        future.set_exception(error)
    assert (grammar.failure, grammar.is_ready) == (expected, False)


def test_an_answer_has_ended_only_with_its_end_token() -> None:
    grammar = request_grammar(StructuredOutputsParams(choice=["yes", "no"]))
    for token_id in [*spelled("yes"), EOS]:
        assert not grammar.has_ended()
        assert grammar.advance(token_id) == ""
    assert grammar.has_ended()
    assert (
        grammar.advance(EOS)
        == f"the grammar failed after {len(spelled('yes')) + 1} tokens: it does not admit token {EOS}"
    )
    assert not grammar.is_ready


@pytest.mark.parametrize("written", ["", "<", "<thi", "<thin", "<think>a", "<think></think>", "<think></think><thi"])
def test_masks_of_drafts_are_those_after_the_drafts(written: str) -> None:
    """Also where the answer and the tag of the reasoning begin alike, so that both are followed."""
    for rest in ("<thing", "thing", "hing", "ing", "ng", "g", "nk>a</think><th", "<think>a"):
        live, ahead = (request_grammar(LIKE_THINK, THINK) for _ in range(2))
        live.replay(spelled(written))
        ahead.replay(spelled(written))
        assert not live.failure
        drafts = spelled(rest)
        expected = [masks(ahead, [])[0]]
        for token_id in drafts:
            if ahead.advance(token_id):
                break
            expected.append(masks(ahead, [])[0])
        for _ in range(2):  # nothing was committed
            rows = masks(live, drafts)
            assert rows[: len(expected)] == expected
            assert all(len(row) >= GRAMMAR.vocab_size for row in rows[len(expected) :])


def test_a_replay_that_needs_too_much_time_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "MAX_TOTAL_SECONDS", 0.0)
    grammar = request_grammar(LIKE_THINK, THINK)
    grammar.replay(spelled("<think>a"))
    assert pace.TOO_SLOW in grammar.failure


def test_a_matcher_that_fails_before_the_answer_is_certain() -> None:
    manager = StructuredOutputManager(lambda: GRAMMAR, GRAMMAR.vocab_size, num_buffers=1)
    try:
        for request_id, regex in (("bad", "a{100000}"), ("good", "a{1,5}")):
            params = StructuredOutputsParams(regex=regex)
            manager.submit(request_id, params, frame=THINK).exception(timeout=300)
        filled = manager.fill([MaskRequest("bad", spelled("aa")), MaskRequest("good")])
        assert list(filled.errors) == ["bad"]
        assert set(filled.masks[:3].ravel()) == {-1}
        assert set(filled.masks[3]) != {-1}
        assert manager.failure("bad") == filled.errors["bad"] != ""
        assert manager.failure("good") == ""
    finally:
        manager.close()


@pytest.mark.parametrize(
    ("error", "expected"), [(TokenizerError("no bytes"), "no bytes"), (ValueError("odd"), "ValueError: odd")]
)
def test_a_frame_that_cannot_be_read_fails_its_request(error: Exception, expected: str) -> None:
    class NoTexts(type(GRAMMAR)):  # type: ignore[misc]
        def vocabulary_bytes(self) -> list[bytes]:
            raise error

    made = NoTexts(TOKENIZER, GRAMMAR.vocab_size, sorted(GRAMMAR.eos_token_ids))
    manager = StructuredOutputManager(lambda: made, GRAMMAR.vocab_size, num_buffers=1)
    try:
        for request_id, frame in (("framed", THINK), ("plain", None)):
            manager.submit(request_id, LIKE_THINK, frame=frame).result(timeout=300)
        assert manager.failure("framed") == f"the grammar failed after 0 tokens: {expected}"
        assert manager.failure("plain") == ""
        assert set(manager.fill([MaskRequest("framed")]).masks.ravel()) == {-1}
    finally:
        manager.close()
