"""What holds for a grammar backend: with three tokenizers and every kind of constraint."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from inflight.errors import InvalidRequestError
from inflight.structured_output.backend import ALL_ALLOWED, MaskJob, num_mask_words, single_token_id
from inflight.structured_output.spec import GrammarSpec
from inflight.structured_outputs_params import StructuredOutputsParams
from tests.conftest import FULL
from tests.support.schema_generator import generate_schemas
from tests.unit.structured_output.grammar_case import (
    CASES,
    TOKENIZERS,
    Case,
    allowed_ids,
    backend,
    follows,
    mask_of,
    num_admitted,
    text_of,
    tokenizer,
    walk,
)

NUM_WALKS = 60 if FULL else 6
BY_NAME = {case.name: case for case in CASES}


def everything() -> list[tuple[str, Case]]:
    return [(kind, case) for kind in TOKENIZERS for case in CASES]


def test_what_the_masks_allow_satisfies_the_constraint() -> None:
    num_whole = 0
    for kind, case in everything():
        grammar = backend(kind)
        compiled = grammar.compile(case.spec)
        for seed in range(NUM_WALKS):
            matcher = compiled.matcher()
            token_ids = walk(matcher, grammar, random.Random(seed), max_tokens=400)
            assert compiled.matcher().accept_tokens(token_ids) == len(token_ids)
            if matcher.is_terminated():
                num_whole += 1
                assert case.check(text_of(kind, token_ids, grammar)), (kind, case.name, seed)
    assert num_whole > 0.9 * NUM_WALKS * len(everything())


def test_generated_schemas() -> None:
    grammar = backend("embedded")
    num_whole = 0
    schemas = generate_schemas(400 if FULL else 40, seed=5)
    for i, schema in enumerate(schemas):
        params = StructuredOutputsParams(json=schema, disable_any_whitespace=i % 2 == 0)
        matcher = grammar.compile(GrammarSpec.from_params(params)).matcher()
        token_ids = walk(matcher, grammar, random.Random(i), max_tokens=1000)
        if matcher.is_terminated():
            num_whole += 1
            follows(schema)(text_of("embedded", token_ids, grammar))
    assert num_whole > 0.95 * len(schemas)


def test_eos_is_allowed_exactly_where_the_text_is_complete() -> None:
    for kind, case in everything():
        grammar = backend(kind)
        matcher = grammar.compile(case.spec).matcher()
        rng = random.Random(3)
        for _ in range(60):
            allowed = set(allowed_ids(mask_of(matcher, grammar)))
            ends = grammar.eos_token_ids & allowed
            assert ends == (grammar.eos_token_ids if matcher.is_accepting() else set()), (kind, case.name)
            assert all(num_admitted(matcher, [end]) == matcher.is_accepting() for end in grammar.eos_token_ids)
            if not (others := sorted(allowed - ends)):
                break
            assert matcher.accept(rng.choice(others))


def test_nothing_but_text_and_eos_is_allowed() -> None:
    for kind, case in everything():
        grammar = backend(kind)
        ids = tokenizer(kind)
        special = ids.all_special_ids - grammar.eos_token_ids
        padding = range(ids.vocab_size, grammar.vocab_size)
        matcher = grammar.compile(case.spec).matcher()
        rng = random.Random(4)
        for _ in range(10):
            allowed = set(allowed_ids(mask_of(matcher, grammar)))
            assert not allowed & special
            assert not allowed & set(padding)
            outside = [*special, padding[0], grammar.vocab_size - 1, grammar.vocab_size, 10**9, -1]
            assert [matcher.accept(token_id) for token_id in outside] == [False] * len(outside)
            assert not matcher.error()
            if not (others := sorted(allowed - grammar.eos_token_ids)) or not matcher.accept(rng.choice(others)):
                break


def test_every_token_of_a_mask_is_accepted() -> None:
    for kind, case in everything():
        grammar = backend(kind)
        matcher = grammar.compile(case.spec).matcher()
        rng = random.Random(6)
        for _ in range(8):
            allowed = allowed_ids(mask_of(matcher, grammar))
            some = rng.sample(allowed, min(len(allowed), 50))
            assert [num_admitted(matcher, [token_id]) for token_id in some] == [1] * len(some)
            others = [token_id for token_id in allowed if token_id not in grammar.eos_token_ids]
            if not others or not matcher.accept(rng.choice(others)):
                break


def test_a_rollback_is_as_if_never_accepted() -> None:
    for kind, case in everything():
        grammar = backend(kind)
        compiled = grammar.compile(case.spec)
        rng = random.Random(7)
        token_ids = walk(compiled.matcher(), grammar, rng, max_tokens=80)
        matcher = compiled.matcher()
        for _ in range(12):
            matcher.accept_tokens(token_ids[matcher.num_accepted : rng.randint(0, len(token_ids))])
            mask_of(matcher, grammar)
            kept = rng.randint(0, matcher.num_accepted)
            matcher.rollback(matcher.num_accepted - kept)
            fresh = compiled.matcher()
            assert fresh.accept_tokens(token_ids[:kept]) == kept == matcher.num_accepted
            np.testing.assert_array_equal(mask_of(matcher, grammar), mask_of(fresh, grammar))
            assert matcher.is_terminated() == fresh.is_terminated()
            assert matcher.is_accepting() == fresh.is_accepting()
            assert matcher.forced_tokens(5) == fresh.forced_tokens(5)


def test_nothing_is_accepted_behind_eos() -> None:
    grammar = backend("embedded")
    matcher = grammar.compile(BY_NAME["choice"].spec).matcher()
    yes = tokenizer("embedded").encode("yes", add_special_tokens=False)
    assert matcher.accept_tokens([*yes, 2]) == len(yes) + 1
    assert matcher.is_terminated()
    assert num_admitted(matcher, [2]) == num_admitted(matcher, [0]) == num_admitted(matcher, yes) == 0
    assert set(mask_of(matcher, grammar)) == {ALL_ALLOWED}
    matcher.rollback(1)
    assert not matcher.is_terminated()
    assert matcher.accept(0)


def test_masks_along_drafts_are_those_of_accepting_one_by_one() -> None:
    for kind, case in everything():
        grammar = backend(kind)
        compiled = grammar.compile(case.spec)
        rng = random.Random(8)
        jobs, expected = [], []
        for seed in range(6):
            token_ids = walk(compiled.matcher(), grammar, random.Random(seed), max_tokens=40)
            start = rng.randint(0, len(token_ids))
            drafts = token_ids[start : start + rng.randint(0, 5)]
            if seed % 3 == 1 and drafts:
                drafts[rng.randrange(len(drafts))] = grammar.vocab_size - 1  # never admitted
            matcher, stepwise = compiled.matcher(), compiled.matcher()
            matcher.accept_tokens(token_ids[:start])
            stepwise.accept_tokens(token_ids[:start])
            jobs.append(MaskJob(matcher, len(expected), drafts))
            is_open = False
            for draft in [*drafts, None]:
                row = mask_of(stepwise, grammar)
                expected.append(np.full_like(row, ALL_ALLOWED) if is_open else row)
                is_open = is_open or draft is None or not stepwise.accept(draft)
        num_words = num_mask_words(grammar.vocab_size)
        before = [job.matcher.num_accepted for job in jobs]
        batch = np.full((len(expected), num_words), 0x5A5A5A5A, dtype=np.int32)
        grammar.fill_masks(jobs, batch)
        np.testing.assert_array_equal(batch, expected)
        alone = np.full((len(expected), num_words), 0x5A5A5A5A, dtype=np.int32)
        for job in jobs:
            job.matcher.fill_masks_along(
                job.draft_token_ids, alone[job.first_row : job.first_row + len(job.draft_token_ids) + 1]
            )
        np.testing.assert_array_equal(alone, expected)
        assert [job.matcher.num_accepted for job in jobs] == before


def test_forced_tokens_are_those_whose_masks_have_one_bit() -> None:
    num_forced = 0
    for kind, case in everything():
        grammar = backend(kind)
        compiled = grammar.compile(case.spec)
        token_ids = walk(compiled.matcher(), grammar, random.Random(9), max_tokens=60)
        matcher = compiled.matcher()
        for token_id in token_ids:
            forced = matcher.forced_tokens(limit=8)
            stepwise = compiled.matcher()
            stepwise.accept_tokens(token_ids[: matcher.num_accepted])
            for forced_id in forced:
                assert allowed_ids(mask_of(stepwise, grammar)) == [forced_id]
                assert stepwise.accept(forced_id)
            assert len(forced) == 8 or len(allowed_ids(mask_of(stepwise, grammar))) != 1
            num_forced += len(forced)
            assert matcher.forced_tokens(limit=1) == forced[:1]
            assert matcher.accept(token_id)
    assert num_forced > 20


def test_single_token_id() -> None:
    rows = np.zeros((6, 3), dtype=np.int32)
    for row, token_ids in enumerate(([], [0], [31], [95], [1, 2], [31, 32])):
        for token_id in token_ids:
            rows[row].view(np.uint32)[token_id // 32] |= np.uint32(1 << (token_id % 32))
    assert [single_token_id(row) for row in rows] == [-1, 0, 31, 95, -1, -1]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            StructuredOutputsParams(json={"properties": {"a": {"not": {}}}}),
            r"json: #/properties/a/not is not supported",
        ),
        (StructuredOutputsParams(json={"type": "array", "contains": {}}), r"json: #/contains is not supported"),
        (StructuredOutputsParams(regex="(?=a)b"), "regex: .*(look-around|Lookahead)"),
        (StructuredOutputsParams(regex="(a"), "regex: "),
        (StructuredOutputsParams(grammar="root ::= ("), "grammar: "),
        (StructuredOutputsParams(grammar="root ::= missing"), "grammar: .*missing"),
        (StructuredOutputsParams(json={"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}), "json: (?!NoExt)"),
        (
            StructuredOutputsParams(structural_tag={"type": "structural_tag"}),
            "structural_tag: .*missing required field `structures`",
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused(params: StructuredOutputsParams, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        backend("embedded").compile(GrammarSpec.from_params(params))


def admitted(texts: list[str], **constraint: Any) -> list[bool]:
    compiled = backend("embedded").compile(GrammarSpec.from_params(StructuredOutputsParams(**constraint)))
    found = []
    for text in texts:
        token_ids = tokenizer("embedded").encode(text, add_special_tokens=False)
        matcher = compiled.matcher()
        found.append(matcher.accept_tokens(token_ids) == len(token_ids) and matcher.is_accepting())
    return found


ONE = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
ONE_IN_A_TAG = {
    "structures": [{"begin": "[f=", "schema": ONE, "end": "]"}],
    "triggers": ["[f"],
    "type": "structural_tag",
}


def test_whitespace() -> None:
    texts = ['{"a":1}', '{"a": 1}', '{\n    "a": 1\n}', '{"a":' + " " * 65 + "1}"]
    assert admitted(texts, json=ONE) == [True, True, True, False]
    assert admitted(texts, json=ONE, disable_any_whitespace=True) == [True, False, False, False]
    assert admitted([f"a [f={text}] b" for text in texts], structural_tag=ONE_IN_A_TAG) == [True, True, True, False]


VALUE = {"a": [1, {"größe": 2}, []], "c": {}}
INTEGERS = {"type": "object", "additionalProperties": {"type": "integer"}}
TYPED = {
    "type": "object",
    "properties": {
        "a": {
            "type": "array",
            "items": {"anyOf": [{"type": "integer"}, INTEGERS, {"type": "array", "items": INTEGERS}]},
        },
        "c": INTEGERS,
    },
    "required": ["a", "c"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("separators", [(", ", ": "), (", ", ":"), (",", ": "), ("  , ", " : "), (",", ":")])
def test_separators_are_all_the_white_space(separators: tuple[str, str]) -> None:
    good = json.dumps(VALUE, separators=separators, ensure_ascii=False)
    bad = {json.dumps(VALUE, separators=(a, b), ensure_ascii=False) for a in (",", ", ") for b in (":", ": ")} - {good}
    bad |= {good.replace("{}", "{ }"), good.replace("[]", "[ ]"), good.replace("[1", "[ 1")}
    texts = [good, *sorted(bad)]
    expected = [True] + [False] * len(bad)
    assert admitted(texts, separators=separators, json=TYPED) == expected
    assert admitted(texts, separators=separators, json_object=True) == expected
    tag = {**ONE_IN_A_TAG, "structures": [{"begin": "[f=", "schema": TYPED, "end": "]"}]}
    tagged = [f"[f={text}]" for text in texts]
    assert admitted(tagged, separators=separators, structural_tag=tag) == expected


@pytest.mark.parametrize("schema", [{"const": {"a": [1, 2]}}, {"items": {"enum": [3, {"a": [1, 2]}]}, "type": "array"}])
def test_separators_hold_in_literals(schema: dict[str, Any]) -> None:
    text = '{"a": [1, 2]}' if "const" in schema else '[3, {"a": [1, 2]}]'
    compact = text.replace(" ", "")
    assert admitted([compact, text], json=schema, separators=(",", ":")) == [True, False]
    assert admitted([text, compact], json=schema, separators=(", ", ": ")) == [True, False]
    named = {"type": "object", "properties": {"const": TYPED}, "additionalProperties": False}
    assert admitted(["{}"], json=named, separators=(", ", ": ")) == [True]
