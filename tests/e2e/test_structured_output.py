"""Structured outputs through `LLM`: what ends satisfies its constraint, the rest is a beginning of it, bad ones are refused.

The weights are random and the temperature high, so that nothing but the mask keeps a text in its grammar. jsonschema says what
satisfies a schema. `make test-full` takes 500 schemas.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from inflight import LLM, RequestOutput, SamplingParams
from inflight.structured_output import pace
from inflight.structured_output.llguidance_backend import LLGuidanceBackend
from inflight.structured_output.spec import GrammarSpec
from inflight.structured_outputs_params import StructuredOutputsParams
from tests.e2e.text_model import EOS_ID, text_config, with_tokenizer
from tests.support.model_zoo import write_model
from tests.support.refusals import refused
from tests.support.schema_generator import generate_schemas
from tests.unit.structured_output.grammar_case import CASES, PERSON, follows, tokenizer

NUM_SCHEMAS = 500 if os.environ.get("INFLIGHT_TEST_FULL") == "1" else 40
HOT = 1.5
PROMPT = "What do you know about her? Answer as JSON: "
BIASED = 6.0  # a token with such a bias comes soon, and not at once
YES_NO = StructuredOutputsParams(choice=["yes", "no"])
COMPACT = StructuredOutputsParams(json=PERSON, disable_any_whitespace=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, and the embedded model's tokenizer; the vocabulary is padded."""
    config = text_config(4096, padding=20)
    return with_tokenizer(write_model(config, tmp_path_factory.mktemp("structured") / "model", seed=3))


def make(folder: Path, **arguments: Any) -> LLM:
    defaults: dict[str, Any] = {"max_num_seqs": 32, "max_model_len": 2048, "kv_cache_memory_bytes": 1 << 25}
    return LLM(str(folder), dtype="float32", generation_config="none", num_threads=1, **{**defaults, **arguments})


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with make(folder) as made:
        yield made


def params_for(constraint: StructuredOutputsParams, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": HOT, "max_tokens": 64, "structured_outputs": constraint, **fields})


def generate(llm: LLM, params: list[SamplingParams]) -> list[RequestOutput]:
    return llm.generate([PROMPT] * len(params), params, use_tqdm=False)


def is_accepted(constraint: StructuredOutputsParams, token_ids: list[int]) -> bool:
    """By a matcher that has seen nothing else."""
    ids = tokenizer("embedded")
    matcher = (
        LLGuidanceBackend(ids, ids.vocab_size + 20, [EOS_ID]).compile(GrammarSpec.from_params(constraint)).matcher()
    )
    return matcher.accept_tokens(token_ids) == len(token_ids)


# -- what comes out ---------------------------------------------------------------------------------------------------------


def test_bounded_schemas_end_and_validate(llm: LLM) -> None:
    schemas = generate_schemas(NUM_SCHEMAS, seed=4)
    constraints = [StructuredOutputsParams(json=schema) for schema in schemas]
    outputs = generate(llm, [params_for(each, max_tokens=1500, seed=i) for i, each in enumerate(constraints)])
    texts = [output.outputs[0].text for output in outputs if output.outputs[0].finish_reason == "stop"]
    for schema, output in zip(schemas, outputs, strict=True):
        assert not output.error
        if output.outputs[0].finish_reason == "stop":
            jsonschema.Draft202012Validator(schema).validate(json.loads(output.outputs[0].text))
    print(f"{len(texts)} of {len(schemas)} end, {sum(map(len, texts))} characters")
    assert len(texts) >= 0.95 * len(schemas)


UNBOUNDED: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "array", "items": {"enum": ["a", "bc"]}},
    {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
    {"type": "object", "additionalProperties": {"type": ["string", "null"]}},
    {"type": "object", "properties": {"text": {"type": "string"}, "more": True}, "required": ["text", "more"]},
    {"$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}, "$ref": "#/$defs/tree"},
]


def test_what_unbounded_schemas_begin_with_is_accepted_by_a_fresh_matcher(llm: LLM) -> None:
    constraints = [StructuredOutputsParams(json=schema) for schema in UNBOUNDED for _ in range(3)]
    outputs = generate(llm, [params_for(each, max_tokens=40, seed=i) for i, each in enumerate(constraints)])
    for constraint, output in zip(constraints, outputs, strict=True):
        completion = output.outputs[0]
        assert completion.finish_reason in ("stop", "length")
        assert is_accepted(constraint, completion.token_ids), completion.text
        if completion.finish_reason == "stop":
            jsonschema.validate(json.loads(completion.text), json.loads(str(constraint.json)))
    assert any(output.outputs[0].finish_reason == "length" for output in outputs)


def test_every_kind_of_constraint(llm: LLM) -> None:
    cases = [case for case in CASES for _ in range(4)]
    outputs = generate(llm, [params_for(case.params, max_tokens=120, seed=i) for i, case in enumerate(cases)])
    ended: set[str] = set()
    for case, output in zip(cases, outputs, strict=True):
        completion = output.outputs[0]
        assert is_accepted(case.params, completion.token_ids), (case.name, completion.text)
        if completion.finish_reason == "stop":
            assert case.check(completion.text), (case.name, completion.text)
            ended.add(case.name)
    assert ended >= {case.name for case in cases} - {"json object", "structural tag"}


# -- together with everything else that a request may ask for ---------------------------------------------------------------

TOGETHER: dict[str, dict[str, Any]] = {
    "n": {"n": 4},
    "greedy": {"temperature": 0.0},
    "penalties": {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "presence_penalty": 1.0},
    "truncation": {"top_p": 0.7, "top_k": 5, "min_p": 0.01},
    "bias against": {"logit_bias": dict.fromkeys(range(3, 1500, 7), -100.0)},
    "bias for a token that is not admitted": {"logit_bias": {500: 100.0}},
    "a longer text is wanted": {"min_tokens": 200},
    "bad words": {"bad_words": ["red"]},
}


@pytest.mark.parametrize("fields", TOGETHER.values(), ids=TOGETHER)
def test_the_text_satisfies_its_schema_whatever_else_is_asked_for(llm: LLM, fields: dict[str, Any]) -> None:
    (output,) = generate(llm, [params_for(COMPACT, seed=5, **{"max_tokens": 300, **fields})])
    assert len(output.outputs) == fields.get("n", 1)
    for completion in output.outputs:
        assert completion.finish_reason == "stop"
        assert completion.stop_reason is None
        assert follows(PERSON)(completion.text)


def test_every_token_has_its_logprobs_and_is_the_same_without(llm: LLM) -> None:
    fields = {"seed": 6, "n": 2}
    (bare,) = generate(llm, [params_for(COMPACT, **fields)])
    stats = llm.llm_engine.core.scheduler.stats
    num_forced = stats.num_forced_tokens
    (output,) = generate(llm, [params_for(COMPACT, logprobs=2, **fields)])
    for completion, other in zip(output.outputs, bare.outputs, strict=True):
        assert completion.token_ids == other.token_ids
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(completion.token_ids)
        for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True):
            assert entry[token_id].logprob <= 0.0  # of the raw logits, in which nothing is forced
        assert (
            min(
                entry[token_id].logprob
                for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True)
            )
            < -3
        )
    assert num_forced > 0


def test_stop_strings(llm: LLM) -> None:
    (output,) = generate(llm, [params_for(COMPACT, stop=['"age"'], seed=1)])
    completion = output.outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", '"age"')
    assert completion.text.startswith('{"name":')
    assert '"age"' not in completion.text


def test_a_cache_that_is_too_small_and_shared_beginnings_change_nothing(llm: LLM, folder: Path) -> None:
    words = StructuredOutputsParams(json={"type": "array", "items": {"enum": ["a", "bc", "def"]}, "minItems": 12})
    params = [params_for(words, seed=i, max_tokens=80, n=2) for i in range(6)]
    expected = [[each.token_ids for each in output.outputs] for output in generate(llm, params)]
    arguments = {
        "max_model_len": 128,
        "block_size": 4,
        "kv_cache_memory_bytes": 33 * 2**12,
    }  # room for one of the longest
    with make(folder, **arguments) as small:
        outputs = [*generate(small, params[:3]), *generate(small, params[3:])]
        stats = small.llm_engine.core.scheduler.stats
        assert min(stats.num_preemptions, stats.num_hit_tokens) > 0
        assert [[each.token_ids for each in output.outputs] for output in outputs] == expected


# -- reasoning ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("marker", [";", ";;"])
def test_the_grammar_starts_behind_the_end_of_thinking(folder: Path, marker: str) -> None:
    bias = dict.fromkeys(tokenizer("embedded").encode(marker, add_special_tokens=False), BIASED * len(marker))
    with make(folder, reasoning_end=marker) as llm:
        thinks = [params_for(YES_NO, max_tokens=600, logit_bias=bias, seed=i) for i in range(6)]
        outputs = generate(llm, thinks)
        (at_once,) = llm.generate([f"{PROMPT}I think {marker}"], thinks[0], use_tqdm=False)
    assert at_once.outputs[0].text in ("yes", "no")
    parts = [output.outputs[0].text.split(marker, 1) for output in outputs]
    assert all(answer in ("yes", "no") for _, answer in parts)
    assert any(thoughts for thoughts, _ in parts)


# -- bad input ----------------------------------------------------------------------------------------------------------------


def test_what_is_refused_before_anything_runs(llm: LLM) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "array", "items": {"not": {"type": "null"}}}}}
    fine = params_for(YES_NO)
    with refused("structured_outputs", "#/properties/a/items/not"):
        generate(llm, [fine, params_for(StructuredOutputsParams(json=bad))])
    with refused("allowed_token_ids"):
        generate(llm, [fine, params_for(YES_NO, allowed_token_ids=[5])])
    assert not llm.llm_engine.has_unfinished_requests()
    with refused("structured_outputs"):
        StructuredOutputsParams(regex="a", choice=["a"])
    with refused("choice"):
        StructuredOutputsParams(choice=[])


BLOW_UPS = {
    "at compilation": "(a?){5000}a{5000}",
    "in the first mask": "a{100000}",
    "in a later mask": "((.{1,60} ){1,60}[a-z]{1,60}){1,60}x",
}


@pytest.mark.parametrize("regex", BLOW_UPS.values(), ids=BLOW_UPS)
def test_a_regex_that_blows_up_fails_alone(llm: LLM, regex: str) -> None:
    others = [params_for(COMPACT, seed=i) for i in range(3)] + [SamplingParams(max_tokens=20, temperature=0.0)]
    expected = [output.outputs[0].token_ids for output in generate(llm, others)]
    blown, *outputs = generate(llm, [params_for(StructuredOutputsParams(regex=regex), seed=1), *others])
    assert blown.outputs[0].finish_reason == "error"
    assert "too" in blown.error
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert not any(output.error for output in outputs)
    llm.llm_engine.core.scheduler.check_integrity()


def test_requests_that_give_way_for_their_slow_grammars_have_the_same_tokens(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = [params_for(COMPACT, seed=i) for i in range(3)] + [SamplingParams(max_tokens=30, temperature=0.0)]
    expected = [output.outputs[0].token_ids for output in generate(llm, mixed)]
    monkeypatch.setattr(pace, "MAX_TOTAL_SECONDS", 1000.0)
    monkeypatch.setattr(pace, "MAX_TOKEN_SECONDS", 1000.0)
    grammars = llm.llm_engine.core.scheduler._grammars
    monkeypatch.setattr(grammars.manager.pace, "slow_seconds", 0.0)
    late: list[int] = []
    wanted = grammars.late
    monkeypatch.setattr(grammars, "late", lambda running: late.append(len(found := wanted(running))) or found)
    outputs = generate(llm, mixed)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert max(late) == 3
    assert not grammars.slow
    llm.llm_engine.core.scheduler.check_integrity()


def test_a_grammar_that_needs_too_much_time_fails_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "MAX_TOKEN_SECONDS", 0.0)
    grammars = llm.llm_engine.core.scheduler._grammars
    monkeypatch.setattr(grammars.manager.pace, "slow_seconds", 0.0)
    digits = params_for(StructuredOutputsParams(regex="[0-9]{40}"), seed=1)
    slow, other = generate(llm, [digits, SamplingParams(max_tokens=20, temperature=0.0)])
    assert slow.outputs[0].finish_reason == "error"
    assert "too much time for each token" in slow.error
    assert other.outputs[0].finish_reason == "length"
    assert not other.error


def test_a_grammar_that_comes_to_a_dead_end_fails_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_masks = LLGuidanceBackend.fill_masks

    def fill_then_close(self: LLGuidanceBackend, jobs: Any, rows: np.ndarray) -> None:
        fill_masks(self, jobs, rows)
        for job in jobs:
            if job.matcher.num_accepted >= 5:
                rows[job.first_row] = 0

    monkeypatch.setattr(LLGuidanceBackend, "fill_masks", fill_then_close)
    digits = params_for(StructuredOutputsParams(regex="[0-9]{40}"), seed=1)
    dead, *outputs = generate(llm, [digits, *[params_for(YES_NO, seed=i) for i in range(4)]])
    assert dead.outputs[0].finish_reason == "error"
    assert "admits no token here" in dead.error
    assert len(dead.outputs[0].token_ids) >= 5
    assert {output.outputs[0].text for output in outputs} <= {"yes", "no"}


def test_a_failed_commit_leaves_no_rank_waiting_for_masks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps in flight are void, and some of them wait for masks. The ranks go on, together."""
    llm = make(folder, tensor_parallel_size=2, distributed_executor_backend="uni")
    scheduler = llm.llm_engine.core.scheduler
    update, num_calls = scheduler.update_from_output, itertools.count()

    def fail_once(*arguments: Any) -> Any:
        return update(*arguments) if next(num_calls) != 2 else 1 // 0

    monkeypatch.setattr(scheduler, "update_from_output", fail_once)
    wanted = [params_for(StructuredOutputsParams(regex="[a-z]{20}"), seed=i) for i in range(3)]
    with pytest.raises(ZeroDivisionError):
        generate(llm, wanted)
    assert all(len(output.outputs[0].text) == 20 for output in generate(llm, wanted))
    llm.close()


def test_every_completion_that_fails_says_why(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where others of the same request go on for longer."""
    fill_masks, closed = LLGuidanceBackend.fill_masks, []

    def close_one(self: LLGuidanceBackend, jobs: Any, rows: np.ndarray) -> None:
        fill_masks(self, jobs, rows)
        if not closed and jobs[0].matcher.num_accepted >= 3:
            closed.append(True)
            rows[jobs[0].first_row] = 0

    monkeypatch.setattr(LLGuidanceBackend, "fill_masks", close_one)
    (output,) = generate(llm, [params_for(StructuredOutputsParams(regex="[0-9]{30}"), seed=1, n=2)])
    assert sorted(completion.finish_reason or "" for completion in output.outputs) == ["error", "stop"]
    assert "admits no token here" in output.error
