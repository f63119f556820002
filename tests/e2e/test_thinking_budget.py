"""Reasoning of at most so many tokens, through `LLM` and all APIs: a cut changes no token before it, and an answer follows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from inflight import LLM, SamplingParams
from inflight.errors import InvalidRequestError
from inflight.hub import EMBEDDED_MODEL
from inflight.outputs import CompletionOutput
from inflight.structured_outputs_params import StructuredOutputsParams
from inflight.tokenizer.folder_tokenizer import folder_tokenizer
from tests.e2e.openai_server import demo_args, running_server

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
    scope="module", params=[None, {"method": "suffix", "num_speculative_tokens": 3}], ids=["plain", "drafts"]
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


# -- the APIs of the server -----------------------------------------------------------------------------------------------

BUDGET = 2


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    args = demo_args(
        chat_template=TEMPLATE, max_model_len=256, reasoning_budget=BUDGET, reasoning_budget_message=MESSAGE
    )
    with running_server(args) as running, httpx.Client(base_url=running.url, timeout=300) as made:
        yield made


def post(client: httpx.Client, path: str, body: dict[str, Any], status: int = 200) -> httpx.Response:
    response = client.post(path, json={"messages": CHAT, "temperature": 0, **body})
    assert response.status_code == status, response.text
    return response


def chat_answer(client: httpx.Client, **fields: Any) -> tuple[str, str, int]:
    """The reasoning, the content, and how many tokens the usage says that the reasoning has."""
    answer = post(client, "/v1/chat/completions", {"max_tokens": LENGTH, **fields}).json()
    message, usage = answer["choices"][0]["message"], answer["usage"]
    return message.get("reasoning_content") or "", message.get("content") or "", _reasoning_tokens(usage)


def _reasoning_tokens(usage: dict[str, Any]) -> int:
    found: int = usage["completion_tokens_details"]["reasoning_tokens"]
    return found


def test_the_server_has_a_default_and_a_request_another_budget(client: httpx.Client) -> None:
    by_default, without = chat_answer(client), chat_answer(client, thinking_token_budget=-1)
    assert by_default == chat_answer(client, thinking_token_budget=BUDGET)
    assert by_default[0].endswith(MESSAGE) and by_default[1]
    assert MESSAGE not in without[0] and without[0].startswith(by_default[0].removesuffix(MESSAGE))
    assert BUDGET < by_default[2] < BUDGET + len(CLOSING)
    for fields in (
        {"reasoning": {"max_tokens": 1}},
        {"thinking": {"type": "enabled", "budget_tokens": 1}},
        {"thinking_budget": 1},
    ):
        assert chat_answer(client, **fields) == chat_answer(client, thinking_token_budget=1) != by_default
    for fields in ({"reasoning_effort": "none"}, {"thinking": {"type": "disabled"}}, {"enable_thinking": False}):
        thought, content, num_thoughts = chat_answer(client, **fields)
        assert not thought and content and num_thoughts < len(TAG)


def test_reasoning_may_be_left_out_of_the_answer(client: httpx.Client) -> None:
    """OpenRouter's name. The usage counts it all the same."""
    thought, content, num_thoughts = chat_answer(client)
    assert thought
    assert chat_answer(client, reasoning={"exclude": True}) == ("", content, num_thoughts)


def test_a_stream_has_the_same_reasoning_and_usage(client: httpx.Client) -> None:
    thought, content, num_thoughts = chat_answer(client)
    asked = {"max_tokens": LENGTH, "stream": True, "stream_options": {"include_usage": True}}
    text = post(client, "/v1/chat/completions", asked).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == thought
    assert "".join(delta.get("content") or "" for delta in deltas) == content
    assert _reasoning_tokens(events[-1]["usage"]) == num_thoughts


def test_the_other_apis_bound_the_same_reasoning(client: httpx.Client) -> None:
    thought, content, num_thoughts = chat_answer(client, thinking_token_budget=1)
    asked = {"messages": None, "input": CHAT, "max_output_tokens": LENGTH, "reasoning": {"max_tokens": 1}}
    answer = post(client, "/v1/responses", asked).json()
    texts = [item["content"][0]["text"] for item in answer["output"]]
    assert texts == [thought, content]
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == num_thoughts
    thinking = {"type": "enabled", "budget_tokens": 1}
    answer = post(client, "/v1/messages", {"max_tokens": LENGTH, "thinking": thinking}).json()
    assert [block.get("thinking") or block.get("text") for block in answer["content"]] == [thought, content]
    assert answer["usage"]["output_tokens_details"]["thinking_tokens"] == num_thoughts
    asked = {"think": True, "stream": False, "options": {"temperature": 0, "num_predict": LENGTH}}
    answer = post(client, "/api/chat", asked).json()
    by_default = chat_answer(client)
    assert (answer["message"]["thinking"], answer["message"]["content"]) == by_default[:2]
    assert answer["thinking_eval_count"] == by_default[2]
    answer = post(client, "/api/chat", {**asked, "think": False}).json()
    assert "thinking" not in answer["message"] and answer["message"]["content"]


def test_what_cannot_be_bounded_is_refused_or_reported() -> None:
    with running_server() as plain, httpx.Client(base_url=plain.url, timeout=300) as client:
        for path, fields, param in (
            ("chat/completions", {"thinking_token_budget": 5}, "thinking_token_budget"),
            ("chat/completions", {"reasoning": {"max_tokens": 5}}, "reasoning.max_tokens"),
            ("responses", {"input": "x", "reasoning": {"max_tokens": 5}}, "reasoning.max_tokens"),
        ):
            assert post(client, f"/v1/{path}", fields, status=400).json()["error"]["param"] == param
        thinking = {"type": "enabled", "budget_tokens": 1024}
        answer = post(
            client, "/v1/messages", {"max_tokens": 4, "thinking": thinking, "output_config": {"effort": "low"}}
        )
        assert "thinking.budget_tokens" in answer.headers["x-ignored-fields"]
        for path, fields, name in (
            ("/v1/chat/completions", {"max_tokens": 4, "reasoning_effort": "low"}, "reasoning_effort"),
            ("/v1/messages", {"max_tokens": 4, "output_config": {"effort": "low"}}, "output_config.effort"),
            ("/api/chat", {"think": "low", "options": {"num_predict": 4}}, "think"),
        ):
            assert name in post(client, path, fields).headers["x-ignored-fields"].split(", ")
