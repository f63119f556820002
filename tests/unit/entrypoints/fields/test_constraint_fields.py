"""A constraint in the words of any API is enforced by each API, or refused: a table of fields and endpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from inflight.entrypoints.fields.constraint_fields import ConstraintFields, Constraints
from inflight.entrypoints.fields.thinking_fields import ThinkingFields
from inflight.structured_outputs_params import StructuredOutputsParams
from tests.unit.entrypoints.api_client import Answer, Api, serving
from tests.unit.entrypoints.refusals import refused

ASKED = [{"role": "user", "content": "x"}]
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": ASKED},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": ASKED, "max_tokens": 20},
    "/api/chat": {"messages": ASKED, "stream": False},
    "/api/generate": {"prompt": "x", "stream": False},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
WRONG = {"type": "no such type"}
STRICT, LENIENT = StructuredOutputsParams(json=SCHEMA), StructuredOutputsParams(json=SCHEMA, lenient=True)
OBJECT = StructuredOutputsParams(json_object=True)
REGEX, CHOICE = StructuredOutputsParams(regex="a+"), StructuredOutputsParams(choice=["a", "b"])
GRAMMAR = StructuredOutputsParams(grammar='root ::= "a"')


def described(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **more}}


def flat(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "schema": schema, **more}


TEXTS: list[tuple[str, Any, StructuredOutputsParams | None]] = [
    ("response_format", described(SCHEMA), LENIENT),
    ("response_format", described(SCHEMA, strict=True), STRICT),
    ("response_format", {"type": "json_object"}, OBJECT),
    ("response_format", {"type": "json_object", "schema": SCHEMA}, LENIENT),
    ("response_format", {"type": "json", "value": SCHEMA}, LENIENT),
    ("response_format", {"type": "regex", "pattern": "a+"}, REGEX),
    ("response_format", {"type": "grammar", "grammar": 'root ::= "a"'}, GRAMMAR),
    ("response_format", {"type": "text"}, None),
    ("text", {"format": flat(SCHEMA, name="n")}, LENIENT),
    ("text", {"format": flat(SCHEMA, name="n", strict=True)}, STRICT),
    ("text", {"format": {"type": "json_object"}}, OBJECT),
    ("text", {"format": {"type": "text"}}, None),
    ("output_config", {"format": flat(SCHEMA)}, LENIENT),
    ("output_format", flat(SCHEMA), LENIENT),
    ("structured_outputs", {"json": SCHEMA}, STRICT),
    ("structured_outputs", {"json_object": True}, OBJECT),
    ("structured_outputs", {"regex": "a+"}, REGEX),
    ("structured_outputs", {"choice": ["a", "b"]}, CHOICE),
    ("structured_outputs", {"grammar": 'root ::= "a"'}, GRAMMAR),
    ("guided_json", SCHEMA, STRICT),
    ("guided_regex", "a+", REGEX),
    ("guided_choice", ["a", "b"], CHOICE),
    ("guided_grammar", 'root ::= "a"', GRAMMAR),
    ("guided_json_object", True, OBJECT),
    ("json_schema", SCHEMA, LENIENT),
    ("regex", "a+", REGEX),
    ("ebnf", 'root ::= "a"', GRAMMAR),
    ("grammar", 'root ::= "a"', GRAMMAR),
    ("format", "json", OBJECT),
    ("format", SCHEMA, LENIENT),
    ("format", "", None),
]
TOKENS: list[tuple[str, Any, str, Any]] = [  # field, value, the member of `SamplingParams`, its value
    ("stop", "!", "stop", ["!"]),
    ("stop", ["!", "?", ""], "stop", ["!", "?"]),
    ("stop_sequences", ["!"], "stop", ["!"]),
    ("stop_token_ids", [7], "stop_token_ids", [7]),
    ("min_tokens", 2, "min_tokens", 2),
    ("ignore_eos", True, "ignore_eos", True),
    ("bad_words", ["a"], "bad_words", ["a"]),
    ("logit_bias", {"7": 5}, "logit_bias", {7: 5.0}),
    ("allowed_token_ids", [7, 33], "allowed_token_ids", [7, 33]),
]
NO_CONSTRAINTS = {"n": 2, "best_of": 2, "logprobs": True, "prompt_logprobs": 1, "echo": True, "num_ctx": 9}
WRONG_TEXTS: list[tuple[str, Any, str]] = [
    # field, value, the field that the error is about; what only the engine core can find is not here
    ("response_format", described(WRONG), "response_format"),
    ("response_format", described(WRONG, strict=True), "response_format"),
    ("text", {"format": flat(WRONG)}, "text.format"),
    ("text", {"format": flat(WRONG, strict=True)}, "text.format"),
    ("output_config", {"format": flat(WRONG)}, "output_config.format"),
    ("output_format", flat(WRONG), "output_format"),
    ("structured_outputs", {"json": WRONG}, "structured_outputs"),
    ("guided_json", WRONG, "guided_json"),
    ("guided_regex", "", "guided_regex"),
    ("guided_grammar", {"type": "json"}, "guided_grammar"),
    ("json_schema", WRONG, "json_schema"),
    ("regex", 5, "regex"),
    ("ebnf", [], "ebnf"),
    ("grammar", {"type": "json", "value": WRONG}, "grammar"),
    ("format", WRONG, "format"),
    ("guided_whitespace_pattern", " ?", "guided_whitespace_pattern"),
    ("guided_choice", [], "guided_choice"),
    ("guided_json_object", "yes", "guided_json_object"),
    ("logits_processors", ["x"], "logits_processors"),
    ("use_beam_search", True, "use_beam_search"),
    ("stop", 5, "stop"),
    ("stop_sequences", [5], "stop_sequences[0]"),
    ("min_tokens", -1, "min_tokens"),
    ("logit_bias", {"a": 1}, "logit_bias"),
]  # fmt: skip
PLACES = pytest.mark.parametrize("inside", [False, True], ids=["", "in options"])
EVERYWHERE = pytest.mark.parametrize("path", ENDPOINTS)


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with serving() as made:
        yield made


def post(api: Api, path: str, fields: dict[str, Any], *, inside: bool = False) -> Answer:
    return api.post(path, {**ENDPOINTS[path], **({"options": fields} if inside else fields)})


def test_the_table_has_all_fields() -> None:
    listed = {name for name, *_ in (*TEXTS, *TOKENS, *WRONG_TEXTS)}
    assert listed == set(Constraints.model_fields) - set(ThinkingFields.model_fields)  # they have a table of their own


@EVERYWHERE
@PLACES
def test_a_constraint_of_the_text_is_enforced(api: Api, path: str, inside: bool) -> None:
    for name, value, expected in TEXTS:
        answer = post(api, path, {name: value}, inside=inside)
        assert (name, answer.status, answer.headers.get("x-ignored-fields")) == (name, 200, None)
        assert api.core.sequences[-1].sampling.params.structured_outputs == expected, name


@EVERYWHERE
@PLACES
def test_a_constraint_of_the_tokens_is_enforced(api: Api, path: str, inside: bool) -> None:
    for name, value, member, expected in TOKENS:
        answer = post(api, path, {name: value}, inside=inside)
        assert (name, answer.status, answer.headers.get("x-ignored-fields")) == (name, 200, None)
        found = getattr(api.core.sequences[-1].sampling.params, member)
        assert (list(found) if isinstance(expected, list) else found) == expected, name


@EVERYWHERE
@PLACES
def test_a_wrong_constraint_is_an_error_that_names_its_field(api: Api, path: str, inside: bool) -> None:
    for name, value, where in WRONG_TEXTS:
        answer = post(api, path, {name: value}, inside=inside)
        assert (name, answer.status) == (name, 400)
        told = answer.error if isinstance(answer.error, str) else answer.error["message"]
        assert name in told or where in told, told
        if path.startswith("/v1") and path != "/v1/messages":  # the others' errors have no such member
            assert (answer.error["param"] or "").removeprefix("options.") == where, name


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/api/chat", "/api/generate"])
def test_what_is_no_constraint_is_reported(api: Api, path: str) -> None:
    for name, value in NO_CONSTRAINTS.items():
        answer = post(api, path, {name: value})
        assert (answer.status, answer.headers["x-ignored-fields"]) == (200, name)


def test_several_constraints_must_say_the_same() -> None:
    same = ConstraintFields.model_validate(
        {"format": SCHEMA, "json_schema": SCHEMA, "options": {"output_format": flat(SCHEMA)}}
    )
    assert (same.constraint(), same.constraint_name()) == (LENIENT, "json_schema")
    others: list[tuple[dict[str, Any], str]] = [
        ({"regex": "a+"}, "format"),
        ({"options": {"regex": "a+"}}, "options.regex"),
        ({"text": {"format": {"type": "json_object"}}}, "format"),
    ]
    for other, second in others:
        with refused(second):
            ConstraintFields.model_validate({"format": SCHEMA, **other}).constraint()


def test_fields_in_options_beside_the_same_fields() -> None:
    both = ConstraintFields.model_validate(
        {"stop": "a", "stop_sequences": ["b", "a"], "min_tokens": 2, "options": {"stop": ["c", "b"], "min_tokens": 2}}
    )
    assert both.given_constraints() == {"stop": ["a", "b", "c"], "min_tokens": 2}
    for name, own, other in (("min_tokens", 2, 3), ("logit_bias", {"1": 1}, {"2": 1}), ("ignore_eos", True, False)):
        with refused(f"options.{name}"):
            ConstraintFields.model_validate({name: own, "options": {name: other}}).given_constraints()
