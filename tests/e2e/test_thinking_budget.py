"""Reasoning of at most so many tokens, through `LLM`: the same tokens before the cut, the closing text, and then an answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from inflight import LLM, SamplingParams
from inflight.errors import InvalidRequestError
from inflight.hub import EMBEDDED_MODEL
from inflight.outputs import CompletionOutput
from inflight.structured_outputs_params import StructuredOutputsParams
from inflight.tokenizer.folder_tokenizer import folder_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
CHAT = [{"role": "user", "content": "What is 7 + 5? Think about it for a long time."}]
LENGTH = 24
MESSAGE = "Enough."
TOKENIZER = folder_tokenizer(EMBEDDED_MODEL)
TAG = TOKENIZER.encode("</think>", add_special_tokens=False)
CLOSING = TOKENIZER.encode(MESSAGE + "</think>", add_special_tokens=False)
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "kv_cache_memory_bytes": 1 << 25,
    "seed": 0,
    "max_model_len": 256,
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.2, "seed": 3},
    "several": {"temperature": 1.0, "seed": 4, "n": 3},
    "logprobs": {"temperature": 1.0, "seed": 5, "logprobs": 1},
    "penalties": {"temperature": 0.0, "frequency_penalty": 1.0, "repetition_penalty": 1.2},
}


@pytest.fixture(
    scope="module", params=[None, {"method": "ngram", "num_speculative_tokens": 3}], ids=["plain", "drafts"]
)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(
        str(EMBEDDED_MODEL),
        chat_template=TEMPLATE,
        speculative_config=request.param,
        reasoning_budget_message=MESSAGE,
        **ENGINE,
    ) as made:
        yield made


def chat(llm: LLM, **params: Any) -> list[CompletionOutput]:
    given = {"max_tokens": LENGTH, "ignore_eos": "structured_outputs" not in params, **params}
    return llm.chat(CHAT, SamplingParams(**given), use_tqdm=False)[0].outputs


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_cut_changes_nothing_before_it(llm: LLM, way: dict[str, Any]) -> None:
    plain = chat(llm, **way)
    for budget in (0, 1, 7, LENGTH - 1):
        closing = CLOSING if budget else TAG
        for found, before in zip(chat(llm, thinking_token_budget=budget, **way), plain, strict=True):
            assert len(found.token_ids) == LENGTH
            assert found.token_ids[:budget] == before.token_ids[:budget]
            assert found.token_ids[budget:][: len(closing)] == closing[: LENGTH - budget]
            assert found.logprobs is None or len(found.logprobs) == LENGTH


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_budget_that_is_not_spent_changes_nothing(llm: LLM, way: dict[str, Any]) -> None:
    plain = [each.token_ids for each in chat(llm, **way)]
    for budget in (-1, LENGTH):
        assert [each.token_ids for each in chat(llm, thinking_token_budget=budget, **way)] == plain


def test_reasoning_that_the_model_closes_in_time_is_not_changed() -> None:
    """It ends with the first full stop."""
    with LLM(str(EMBEDDED_MODEL), chat_template=TEMPLATE, reasoning_end=".", **ENGINE) as here:
        (plain,) = chat(here, temperature=0.0)
        num_thoughts = plain.token_ids.index(TOKENIZER.encode(".", add_special_tokens=False)[0])
        assert 1 < num_thoughts < LENGTH - 2
        for budget in (num_thoughts, num_thoughts + 1, LENGTH - 1):
            (found,) = chat(here, temperature=0.0, thinking_token_budget=budget)
            assert found.token_ids == plain.token_ids
        (found,) = chat(here, temperature=0.0, thinking_token_budget=num_thoughts - 1)
        assert found.token_ids[: num_thoughts + 1] != plain.token_ids[: num_thoughts + 1]


def test_a_grammar_begins_after_the_closing_text(llm: LLM) -> None:
    yes_no = StructuredOutputsParams(choice=["yes", "no"])
    for budget in (0, 3):
        for each in chat(llm, thinking_token_budget=budget, structured_outputs=yes_no, temperature=1.0, n=2, seed=1):
            thought, _, answer = each.text.partition("</think>")
            assert answer in ("yes", "no") and each.finish_reason == "stop"
            assert thought.endswith(MESSAGE) == bool(budget)


def test_a_prompt_without_a_chat_is_bounded_by_its_own_tags(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, thinking_token_budget=2)
    opened, plain = llm.generate(["Hello <think>", "Hello"], params, use_tqdm=False)
    assert opened.outputs[0].token_ids[2:][: len(CLOSING)] == CLOSING
    assert CLOSING[0] not in plain.outputs[0].token_ids


def test_a_budget_for_a_model_whose_reasoning_is_not_found_is_refused() -> None:
    with LLM(str(EMBEDDED_MODEL), **ENGINE) as plain, pytest.raises(InvalidRequestError):
        chat(plain, thinking_token_budget=5)
