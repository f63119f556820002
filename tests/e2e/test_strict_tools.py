"""Tools that the embedded model, and a die, may or must call: what is called validates at any temperature."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from inflight import LLM, SamplingParams
from inflight.interface.events import ContentDelta, ToolArgumentsDelta, ToolCallStart
from inflight.parsers.selector import create_output_parser, detect_parsers
from inflight.parsers.tool_choice import ToolChoice, constrain_tools
from inflight.structured_outputs_params import StructuredOutputsParams
from inflight.tokenizer.chat_template import ChatTemplate
from scripts.demo.evaluate import held_out_samples
from scripts.demo.tasks import Sample, is_correct
from tests.e2e.openai_server import running_server
from tests.support.refusals import refused
from tests.unit.structured_output.grammar_case import MODEL

SAMPLES = [sample for sample in held_out_samples("tools", 24) if sample.tools][:20]
CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
OWN = {
    "type": "object",
    "properties": {"limit": {"type": "integer", "minimum": 3, "maximum": 5}},
    "required": ["limit"],
    "additionalProperties": False,
}
UNIT = {
    "type": "object",
    "properties": {"unit": {"enum": ["°C", "}", "</tool_call>"]}, "of": {"type": "array", "items": OWN, "maxItems": 2}},
    "required": ["unit"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32", num_threads=1, kv_cache_memory_bytes=1 << 25) as made:
        yield made


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with running_server() as server, httpx.Client(base_url=server.url, timeout=300) as made:
        yield made


def tools_of(sample: Sample, *, strict: bool) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {**tool["function"], "strict": strict}} for tool in sample.tools]


def chat(llm: LLM, sample: Sample, tools: list[dict[str, Any]], params: SamplingParams) -> tuple[str, list[int]]:
    (output,) = llm.chat(list(sample.messages), params, tools=tools, use_tqdm=False)
    completion = output.outputs[0]
    assert completion.finish_reason == "stop", (output.error, completion.text)
    return completion.text, completion.token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_every_call_is_one_of_the_tools_and_satisfies_its_schema(llm: LLM, temperature: float) -> None:
    num_calls = num_correct = 0
    markup = detect_parsers(ChatTemplate.from_folder(MODEL)).markup
    prompts, all_params = [], []
    for seed, sample in enumerate(SAMPLES):
        tools = tools_of(sample, strict=True)
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=200)
        all_params.append(constrain_tools(params, tools, markup=markup))
        prompts.append({"prompt_token_ids": llm.llm_engine.render_chat(sample.messages, tools=tools)})
    for sample, output in zip(SAMPLES, llm.generate(prompts, all_params, use_tqdm=False), strict=True):
        text = output.outputs[0].text
        assert output.outputs[0].finish_reason == "stop", (output.error, text)
        bodies = CALL.findall(text)
        assert len(bodies) == text.count("<tool_call>")
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in sample.tools}
        for body in map(json.loads, bodies):
            assert list(body) == ["name", "arguments"]
            jsonschema.validate(body["arguments"], schemas[body["name"]])
        num_calls += len(bodies)
        num_correct += is_correct(sample, text)
    assert num_calls >= len(SAMPLES) / 3
    assert num_correct >= len(SAMPLES) / 3


def test_the_schema_binds_where_the_model_would_write_something_else(llm: LLM) -> None:
    sample = next(sample for sample in SAMPLES if "tool_calls" in sample.answer)
    tools = [{"type": "function", "function": {**tool["function"], "parameters": OWN}} for tool in sample.tools]
    tools[0]["strict"] = True
    params = SamplingParams(temperature=0.0, max_tokens=200, logit_bias={3: 100.0})  # it begins with <tool_call>
    for tool in tools[1:]:
        tool["strict"] = True
    (output,) = llm.chat(list(sample.messages), params, tools=tools, use_tqdm=False)
    found = CALL.match(output.outputs[0].text)
    assert found
    jsonschema.validate(json.loads(found[1])["arguments"], OWN)


def test_without_strict_nothing_changes(llm: LLM) -> None:
    for seed, sample in enumerate(SAMPLES[:6]):
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=40)
        tools = tools_of(sample, strict=False)
        (output,) = llm.chat(list(sample.messages), params, tools=tools, use_tqdm=False)
        prompt = {"prompt_token_ids": llm.llm_engine.render_chat(sample.messages, tools=tools)}
        (bare,) = llm.generate(prompt, params, use_tqdm=False)
        assert output.outputs[0].token_ids == bare.outputs[0].token_ids
        assert llm.llm_engine.with_strict_tools(None, tools) is None


def called_tools(text: str, tools: list[dict[str, Any]]) -> list[str]:
    """The names of the calls that `text` is made of, and nothing else; their arguments fit the schemas."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    parser = create_output_parser("hermes", None, tools=tools)
    events = [event for character in text for event in parser.push(character)] + parser.finish()
    assert not any(isinstance(event, ContentDelta) for event in events), text
    names = [event.name for event in events if isinstance(event, ToolCallStart)]
    for i, name in enumerate(names):
        arguments = [event.text for event in events if isinstance(event, ToolArgumentsDelta) and event.index == i]
        jsonschema.validate(json.loads("".join(arguments)), schemas[name])
    return names


# At 50 the model is a die: the constraint alone makes the call.
@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
def test_a_choice_makes_a_call_come(llm: LLM, temperature: float) -> None:
    markup = detect_parsers(ChatTemplate.from_folder(MODEL)).markup
    wanted: list[tuple[list[dict[str, Any]], ToolChoice]] = []
    prompts, all_params = [], []
    for seed, sample in enumerate(SAMPLES[:8]):
        tools = tools_of(sample, strict=False)
        for tool, schema in zip(tools, [OWN, UNIT, OWN], strict=False):
            tool["function"]["parameters"] = schema
        names = [tool["function"]["name"] for tool in tools]
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=600)
        choices: list[tuple[ToolChoice, bool]] = [("required", False), ({"name": names[-1]}, True)]
        for choice, parallel in choices:
            wanted.append((tools, choice))
            all_params.append(constrain_tools(params, tools, choice, parallel_tool_calls=parallel, markup=markup))
            prompts.append({"prompt_token_ids": llm.llm_engine.render_chat(sample.messages, tools=tools)})
    forced: set[tuple[str, ...]] = set()
    outputs = llm.generate(prompts, all_params, use_tqdm=False)
    for (tools, choice), output in zip(wanted, outputs, strict=True):
        completion = output.outputs[0]
        assert completion.finish_reason == "stop", (output.error, completion.text)
        called = called_tools(completion.text, tools)
        assert len(called) == 1
        assert choice == "required" or called == [tools[-1]["function"]["name"]]
        forced.add(tuple(called))
    assert len(forced) > 1


def test_what_is_refused(llm: LLM) -> None:
    sample = SAMPLES[0]
    tools = tools_of(sample, strict=True)
    own = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    with refused("regex"):
        llm.chat(list(sample.messages), own, tools=tools, use_tqdm=False)
    tools[0]["function"]["parameters"] = {"type": "object", "properties": {"a": {"not": {}}}}
    with refused("tools[0]", tools[0]["function"]["name"], "#/properties/a/not"):
        llm.chat(list(sample.messages), tools=tools, use_tqdm=False)


def test_a_call_or_the_json_comes_and_what_is_not_enforced_is_told_once(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    """At a temperature where the model is a die, the grammar alone decides."""
    tools = tools_of(SAMPLES[0], strict=True)
    for tool in tools:
        tool["function"]["parameters"] = OWN
    answer = {**OWN, "properties": {**OWN["properties"], "tags": {"type": "array", "uniqueItems": True, "maxItems": 0}}}
    kinds = set()
    for seed in range(8):
        params = SamplingParams(
            temperature=50.0, seed=seed, max_tokens=400, structured_outputs=StructuredOutputsParams(json=answer)
        )
        text, _ = chat(llm, SAMPLES[0], tools, params)
        if text.startswith("{"):
            jsonschema.validate(json.loads(text), answer)
        else:
            called_tools(text, tools)
        kinds.add(text[0])
    assert kinds == {"{", "<"}
    told = [record.getMessage() for record in caplog.records if "cannot enforce" in record.getMessage()]
    assert told == [
        "response_format: #/properties/tags/uniqueItems: the grammar library cannot enforce this part, so it is ignored"
    ]


# The bias makes the model begin a tag, which it would not do by itself; the grammar makes the rest.
@pytest.mark.parametrize("is_new", [False, True])
def test_a_structural_tag_of_response_format_is_followed(client: httpx.Client, is_new: bool) -> None:
    begin, end = "<tool_call>[", "]</tool_call>"
    content = {"type": "json_schema", "json_schema": OWN}
    response_format: dict[str, Any] = {
        "type": "structural_tag",
        "structures": [{"begin": begin, "schema": OWN, "end": end}],
        "triggers": ["<tool_call>"],
    }
    if is_new:
        tags = [{"type": "tag", "begin": begin, "content": content, "end": end}]
        wanted = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": tags, "stop_after_first": True}
        response_format = {"type": "structural_tag", "format": wanted}
    asked = {
        "messages": [{"role": "user", "content": "What is 7 + 5?"}], "response_format": response_format, "n": 4,
        "temperature": 2.0, "logit_bias": {"3": 100}, "max_tokens": 150, "seed": 1, "skip_special_tokens": False,
    }  # fmt: skip
    response = client.post("/v1/chat/completions", json=asked)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    num_tags = 0
    for choice in choices:
        before, *texts = choice["message"]["content"].split(begin)
        assert before == ""
        for text in texts[: None if choice["finish_reason"] == "stop" else -1]:  # the last may be cut
            written, found, _ = text.partition(end)
            assert found
            jsonschema.validate(json.loads(written), OWN)
            num_tags += 1
    assert num_tags >= len(choices)
    assert not is_new or num_tags == len(choices)
