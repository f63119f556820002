"""What the tests of grammars share: backends over three tokenizers, constraints and what holds of their texts, and walks."""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import numpy as np

from inflight.structured_output.backend import GrammarBackend, GrammarMatcher, num_mask_words
from inflight.structured_output.llguidance_backend import LLGuidanceBackend
from inflight.structured_output.spec import GrammarSpec
from inflight.structured_outputs_params import StructuredOutputsParams
from inflight.tokenizer.folder_tokenizer import folder_tokenizer
from inflight.tokenizer.tokenizer import Tokenizer
from inflight.tokenizer.vocabulary_bytes import vocabulary_bytes
from tests.support.fakes_tokenizer import BOS, EOS, USER, trained

MODEL = Path(__file__).resolve().parents[3] / "inflight" / "demo" / "model"
TOKENIZERS = ("embedded", "byte_level", "byte_fallback")


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    if kind == "embedded":
        return folder_tokenizer(MODEL)
    return Tokenizer(trained(kind), {"bos_token": BOS, "eos_token": EOS}, [USER])


@functools.cache
def backend(kind: str) -> GrammarBackend:
    """With two EOS ids, and a vocabulary padded beyond the tokenizer's."""
    ids = tokenizer(kind)
    eos = [2, 0] if kind == "embedded" else [ids.eos_token_id, ids.encode(USER, add_special_tokens=False)[0]]
    assert all(token_id is not None for token_id in eos)
    return LLGuidanceBackend(ids, ids.vocab_size + 70, [token_id for token_id in eos if token_id is not None])


@functools.cache
def vocabulary(kind: str) -> list[bytes]:
    return vocabulary_bytes(tokenizer(kind))


def text_of(kind: str, token_ids: list[int], grammar: GrammarBackend) -> str:
    """The text of tokens, an EOS at the end left out. It must be whole characters."""
    content = [token_id for token_id in token_ids if token_id not in grammar.eos_token_ids]
    return b"".join(vocabulary(kind)[token_id] for token_id in content).decode()


@dataclass(frozen=True)
class Case:
    """A constraint, and what every whole text of it must fulfil."""

    name: str
    params: StructuredOutputsParams
    check: Callable[[str], bool]

    @property
    def spec(self) -> GrammarSpec:
        return GrammarSpec.from_params(self.params)


def follows(schema: object) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
        return True

    return check


PERSON = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Mia", "Jörg", 'a "b"']},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "v": {"type": "boolean"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1},
            },
            "required": ["v"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
REGEX = r"(\d{1,3}\.){3}\d{1,3}( [A-Zä-ö]{2,5})?"
CHOICES = ["yes", "no", "yes, but", 'a "quoted" \\ one', "naïve 東京 🙂", "two\nlines"]
GBNF = """
root ::= expr "=" num
expr ::= num ([-+*/] num){1,3}
num ::= [0-9] | [1-9] [0-9]{1,2}
"""
LARK = """
start: NUM ("+" NUM)~1..3 "=" NUM
NUM: /[0-9]|[1-9][0-9]{1,2}/
"""
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["x"],
    "additionalProperties": False,
}
TAGS = {
    "type": "structural_tag",
    "structures": [
        {"begin": "[f=dot>", "schema": POINT, "end": "[/f]"},
        {"begin": "[f=pair>", "schema": {"type": "array", "items": POINT, "minItems": 2, "maxItems": 2}, "end": "[/f]"},
    ],
    "triggers": ["[f="],
}
_TAG_TEXT = re.compile(r"\[f=(?:dot>(?P<dot>.*?)|pair>(?P<pair>.*?))\[/f\]", re.DOTALL)


def tags_are_whole(text: str) -> bool:
    """Every trigger in the text begins one of the tags, and JSON by its schema stands in it."""
    for start in [found.start() for found in re.finditer(re.escape("[f="), text)]:
        tag = _TAG_TEXT.match(text, start)
        if tag is None:
            return False
        schema = TAGS["structures"][0 if tag["dot"] is not None else 1]["schema"]  # type: ignore[index]
        jsonschema.validate(json.loads(tag["dot"] if tag["dot"] is not None else tag["pair"]), schema)
    return True


def is_sum(text: str) -> bool:
    return re.fullmatch(r"\d{1,3}([-+*/]\d{1,3}){1,3}=\d{1,3}", text, re.ASCII) is not None


CASES = (
    Case("json", StructuredOutputsParams(json=PERSON), follows(PERSON)),
    Case("json compact", StructuredOutputsParams(json=PERSON, disable_any_whitespace=True), follows(PERSON)),
    Case(
        "json with separators",
        StructuredOutputsParams(json=PERSON, separators=(", ", ": ")),
        lambda text: follows(PERSON)(text) and text == json.dumps(json.loads(text), ensure_ascii=False),
    ),
    Case("json recursive", StructuredOutputsParams(json=TREE, disable_any_whitespace=True), follows(TREE)),
    Case("json object", StructuredOutputsParams(json_object=True), lambda text: isinstance(json.loads(text), dict)),
    Case("regex", StructuredOutputsParams(regex=REGEX), lambda text: re.fullmatch(REGEX, text, re.ASCII) is not None),
    Case("choice", StructuredOutputsParams(choice=CHOICES), lambda text: text in CHOICES),
    Case("gbnf", StructuredOutputsParams(grammar=GBNF), is_sum),
    Case("lark", StructuredOutputsParams(grammar=LARK), is_sum),
    Case("structural tag", StructuredOutputsParams(structural_tag=TAGS), tags_are_whole),
)


def num_admitted(matcher: GrammarMatcher, token_ids: Sequence[int]) -> int:
    """How many of these tokens the matcher would accept. Its state does not change."""
    num_accepted = matcher.accept_tokens(token_ids)
    matcher.rollback(num_accepted)
    return num_accepted


def mask_of(matcher: GrammarMatcher, grammar: GrammarBackend) -> np.ndarray:
    row = np.full(num_mask_words(grammar.vocab_size), 0x5A5A5A5A, dtype=np.int32)
    matcher.fill_mask(row)
    return row


def allowed_ids(row: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def walk(
    matcher: GrammarMatcher, grammar: GrammarBackend, rng: random.Random, max_tokens: int, end: float = 0.3
) -> list[int]:
    """Tokens drawn from the masks, EOS with probability `end` where allowed; until EOS, an error, or `max_tokens`."""
    token_ids: list[int] = []
    while len(token_ids) < max_tokens and not matcher.is_terminated():
        allowed = allowed_ids(mask_of(matcher, grammar))
        if matcher.error():
            break
        ends = [token_id for token_id in allowed if token_id in grammar.eos_token_ids]
        others = [token_id for token_id in allowed if token_id not in grammar.eos_token_ids]
        token_id = rng.choice(ends if ends and (not others or rng.random() < end) else others)
        if not matcher.accept(token_id):
            assert matcher.error(), f"{token_id} was in the mask"
            break
        token_ids.append(token_id)
    return token_ids
