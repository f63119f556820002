"""Log-probabilities in both shapes: bytes, ranks, offsets, and what JSON cannot say."""

from __future__ import annotations

import pytest

from inflight.entrypoints.http.logprobs import LOWEST, chat_logprobs
from inflight.entrypoints.openai.logprobs import CompletionLogprobs, prompt_logprobs
from inflight.errors import EngineError
from inflight.outputs import Logprob
from tests.support.fakes_tokenizer import byte_tokenizer
from tests.unit.entrypoints.outputs import row

ROW = {7: Logprob(-3.0, 3, "é"), 5: Logprob(-1.0, 1, "a"), 6: Logprob(float("-inf"), 2, "b")}  # the drawn token first


def test_chat_shows_the_token_and_the_best_by_rank() -> None:
    (entry,) = chat_logprobs([ROW], 2, None)
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("é", -3.0, [0xC3, 0xA9])
    assert [top["token"] for top in entry["top_logprobs"]] == ["a", "b"]
    assert entry["top_logprobs"][1]["logprob"] == LOWEST  # JSON has no infinity
    assert chat_logprobs([ROW], 0, None)[0]["top_logprobs"] == []


def test_offsets_are_characters_and_go_on_over_chunks() -> None:
    columns = CompletionLogprobs()
    assert columns.columns([row("é"), row("東京")])["text_offset"] == [0, 1]
    assert columns.columns([row("b"), row("")])["text_offset"] == [3, 4]
    assert columns.columns([row("c")])["text_offset"] == [4]


def test_offsets_count_a_character_of_several_tokens_once() -> None:
    tokenizer = byte_tokenizer()
    rows = [{token_id: Logprob(-1.0, 1, tokenizer.decode_token(token_id))} for token_id in "aé🙂b".encode()]
    assert CompletionLogprobs(tokenizer).columns(rows)["text_offset"] == [0, 1, 1, 2, 2, 2, 2, 3]


def test_the_prompts_first_token_has_a_text_and_no_logprob() -> None:
    found = CompletionLogprobs().columns([None, row("b")], (5, "a"))
    assert found["tokens"] == ["a", "b"]
    assert found["token_logprobs"] == [None, -1.0]
    assert found["top_logprobs"][0] is None
    assert found["text_offset"] == [0, 1]


def test_tokens_by_their_ids() -> None:
    (entry,) = chat_logprobs([ROW], 2, None, as_ids=True)
    assert (entry["token"], entry["bytes"]) == ("token_id:7", [0xC3, 0xA9])
    assert [top["token"] for top in entry["top_logprobs"]] == ["token_id:5", "token_id:6"]
    found = CompletionLogprobs(as_ids=True).columns([None, ROW], (3, "ab"))
    assert found["tokens"] == ["token_id:3", "token_id:7"]
    assert found["top_logprobs"] == [None, {"token_id:7": -3.0, "token_id:5": -1.0, "token_id:6": LOWEST}]
    assert found["text_offset"] == [0, 2]


def test_of_tokens_with_one_text_the_highest_value_is_shown() -> None:
    worst_first = {7: Logprob(-3.0, 3, "a"), 5: Logprob(-1.0, 1, "a"), 6: Logprob(-2.0, 2, "b")}
    best_first = {5: Logprob(-1.0, 1, "a"), 6: Logprob(-2.0, 2, "b"), 7: Logprob(-3.0, 3, "a")}
    found = CompletionLogprobs().columns([worst_first, best_first])
    assert found["token_logprobs"] == [-3.0, -1.0]
    assert found["top_logprobs"] == [{"a": -1.0, "b": -2.0}] * 2


def test_a_prompts_logprobs_are_by_token_id() -> None:
    first, second = prompt_logprobs([None, ROW])
    assert first is None and second is not None
    assert second["6"] == {"logprob": LOWEST, "rank": 2, "decoded_token": "b"}
    assert list(second) == ["7", "5", "6"]


def test_a_log_probability_that_is_no_number_is_an_error_of_the_engine() -> None:
    """A logit was infinite. JSON has no NaN."""
    row = {7: Logprob(logprob=float("nan"), rank=1, decoded_token="a")}
    with pytest.raises(EngineError, match="logits are not finite"):
        chat_logprobs([row], 1, None)
