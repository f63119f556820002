"""Grammars by llguidance (github.com/guidance-ai/llguidance): an Earley parser over a lexer of derivatives, in Rust.

It is made from tokenizer.json itself, so that it knows how the tokenizer spells a text: where the grammar admits one text only,
exactly one token is allowed, the one that the tokenizer would choose.

Limits: the regexes of a grammar can grow without bound, and do so while masks are computed. "Fuel" counts the work of building
them; past it, or past the number of lexer states or parser items, a matcher fails. See `_limits` for the sizes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark
from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

from inflight.errors import ConfigError, InvalidRequestError
from inflight.structured_output.backend import (
    ALL_ALLOWED,
    TOO_COMPLEX,
    CompiledGrammar,
    GrammarBackend,
    GrammarMatcher,
    MaskJob,
    MaskRow,
    MaskRows,
)
from inflight.structured_output.json_schema import SchemaSupport, keyword_paths, name_place
from inflight.structured_output.spec import GrammarSpec, StructuralTag, Tag, parse_structural_tag
from inflight.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_KEYWORDS = """
    type enum const anyOf allOf oneOf $ref
    properties patternProperties additionalProperties required minProperties maxProperties
    items prefixItems additionalItems minItems maxItems
    minLength maxLength pattern format
    minimum maximum exclusiveMinimum exclusiveMaximum multipleOf
"""
_FORMATS = "date-time time date duration email hostname ipv4 ipv6 uuid uri"
_FREE_TEXT = r"FREE_TEXT: /(.|\n)*/"
_ASCII_CLASSES = "dws"  # as in JSON Schema's patterns; Unicode's digits would surprise, and differ between its versions
_MAX_ERROR_LENGTH = 500  # characters; an error may quote the grammar
_LIMITS = re.compile(r"current row has|too many (items|expressions|states|rows)|fuel|too (large|big)", re.IGNORECASE)


def _limits() -> LLParserLimits:
    """At the worst a tenth of a second for the first mask of a grammar, 10 ms for a later one, and 100 MB a matcher.

    Verbose errors would quote what other requests emitted. Large lexemes are computed at once, so that they fail at once.
    """
    return LLParserLimits(
        initial_lexer_fuel=300_000,
        step_lexer_fuel=100_000,
        max_lexer_states=50_000,
        step_max_items=50_000,
        max_grammar_size=500_000,
        precompute_large_lexemes=True,
        verbose_errors=False,
    )


@dataclass(frozen=True, slots=True)
class _SpecialToken:
    """A token that the library never takes for its spelling. One that is shown in texts (<tool_call>) may also be spelled."""

    token_id: int
    is_shown: bool

    def lark(self, text: str) -> str:
        return f"(<[{self.token_id}]> | {json.dumps(text)})" if self.is_shown else f"<[{self.token_id}]>"


class LLGuidanceBackend(GrammarBackend):
    """The default backend. It fills the masks of a step without the interpreter lock.

    Raises:
        ConfigError: the tokenizer is neither byte-level nor sentencepiece-like with byte fallback.
    """

    schema_support = SchemaSupport(frozenset(_KEYWORDS.split()), frozenset(_FORMATS.split()))

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        super().__init__(tokenizer, vocab_size, eos_token_ids)
        try:
            self._tokenizer = LLTokenizer(tokenizer.to_json(), n_vocab=vocab_size, eos_token=list(eos_token_ids))
        except ValueError as error:
            raise ConfigError(f"structured outputs cannot use this model's tokenizer: {error}") from error
        self._special_tokens = {
            piece: _SpecialToken(token_id, token_id not in tokenizer.all_special_ids)
            for token_id in range(self._tokenizer.vocab_size)
            if self._tokenizer.is_special_token(token_id) and (piece := tokenizer.id_to_piece(token_id))
        }
        self._executor = LLExecutor(1)

    def fill_masks(self, jobs: Sequence[MaskJob], rows: MaskRows) -> None:
        single: list[tuple[LLMatcher, int]] = []
        along: list[tuple[LLMatcher, int, list[int]]] = []
        live: list[MaskJob] = []
        for job in jobs:
            matcher = job.matcher
            assert isinstance(matcher, LLGuidanceMatcher)
            drafts = list(job.draft_token_ids)
            num_valid = matcher.count_drafts_before_end(drafts)
            rows[job.first_row + num_valid + 1 : job.first_row + len(drafts) + 1].fill(ALL_ALLOWED)
            if matcher.is_terminated() or matcher.error():
                rows[job.first_row : job.first_row + num_valid + 1].fill(ALL_ALLOWED)
                continue
            live.append(job)
            if num_valid:
                along.append((matcher.inner, job.first_row, drafts[:num_valid]))
            else:
                single.append((matcher.inner, job.first_row))
        if single:
            fill_next_token_bitmask_par(self._executor, single, rows)
        if along:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, along, rows)
        for job in live:
            if job.matcher.error():
                rows[job.first_row : job.first_row + len(job.draft_token_ids) + 1].fill(ALL_ALLOWED)

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar:
        grammar = self._grammar(spec)
        inner = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_limits())
        if not inner.is_error():
            inner.compute_bitmask()  # what the lexer learns here is copied to every request's matcher
        if inner.is_error():
            raise InvalidRequestError(f"{spec.subject}: {self._explain(spec, inner.get_error())}")
        # Per lexer state about 2 kB; the library does not tell how many there are. A multiple of the text is the best we have.
        return LLGuidanceGrammar(inner, self.vocab_size, self.eos_token_ids, 64 * len(grammar))

    def _grammar(self, spec: GrammarSpec) -> str:
        """The grammar in llguidance's own notation."""
        try:
            match spec.kind:
                case "json":
                    return LLMatcher.grammar_from_json_schema(spec.text, overrides=_whitespace_options(spec))
                case "json_object":
                    return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=_whitespace_options(spec))
                case "regex":
                    return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(spec.text, _ASCII_CLASSES)}/")
                case "choice":
                    choices = " | ".join(json.dumps(choice) for choice in spec.choices())
                    return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
                case "structural_tag":
                    structural_tag = parse_structural_tag(spec.text)
                    to_lark = _free_text_lark if structural_tag.separator is None else _tags_only_lark
                    return LLMatcher.grammar_from_lark(to_lark(structural_tag, spec, self._special_tokens))
                case _:
                    return LLMatcher.grammar_from_lark(any_to_lark(spec.text))
        except InvalidRequestError:
            raise
        except Exception as error:  # the reader of GBNF raises nothing more specific
            raise InvalidRequestError(f"{spec.kind}: {error}") from error

    def _explain(self, spec: GrammarSpec, error: str) -> str:
        if "coerce_one_of" in error and spec.kind in ("json", "structural_tag"):
            places = ", ".join(_one_ofs(spec))
            return f"a value could match two branches of a oneOf ({places}): tell them apart, or use anyOf"
        return _shorten(error)


class LLGuidanceGrammar(CompiledGrammar):
    """A matcher at the start of the text, that is only ever copied (microseconds)."""

    def __init__(self, inner: LLMatcher, vocab_size: int, eos_token_ids: frozenset[int], size_bytes: int) -> None:
        self._inner = inner
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._size_bytes = size_bytes

    def matcher(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self._inner.deep_copy(), self._vocab_size, self._eos_token_ids)

    @property
    def size_bytes(self) -> int:
        return self._size_bytes


class LLGuidanceMatcher(GrammarMatcher):
    """`inner` is never shown an EOS that ends the text: it would not always take it back."""

    def __init__(self, inner: LLMatcher, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        super().__init__(vocab_size, eos_token_ids)
        self.inner = inner

    def is_accepting(self) -> bool:
        return bool(self.inner.is_accepting())

    def error(self) -> str:
        return _shorten(self.inner.get_error()) if self.inner.is_error() else ""

    def count_drafts_before_end(self, draft_token_ids: Sequence[int]) -> int:
        """How many drafts are admitted before the first that is not, or that is an EOS."""
        end = next((i for i, token_id in enumerate(draft_token_ids) if token_id in self._eos_token_ids), None)
        return self.validate_tokens(draft_token_ids[:end])

    def forced_tokens(self, limit: int) -> list[int]:
        """Mostly there are none, and the library says so sooner than it makes a mask. It does not count the end as forced."""
        if (
            not self.error()
            and not self.is_terminated()
            and not self.is_accepting()
            and not self.inner.compute_ff_tokens()
        ):
            return []
        return super().forced_tokens(limit)

    def _accept(self, token_id: int) -> bool:
        return self.inner.try_consume_tokens([token_id]) == 1

    def _rollback(self, num_tokens: int) -> None:
        self.inner.rollback(num_tokens)

    def _fill_mask(self, row: MaskRow) -> None:
        self.inner.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)


def _whitespace_options(spec: GrammarSpec) -> JsonCompileOptions:
    if spec.whitespace:
        return {"whitespace_pattern": spec.whitespace}
    item, key = spec.separators
    return {"whitespace_flexible": False, "item_separator": item, "key_separator": key}


def _free_text_lark(
    structural_tag: StructuralTag, spec: GrammarSpec, special_tokens: Mapping[str, _SpecialToken]
) -> str:
    """Free text, with one rule a trigger. A lazy terminal ends as soon as its trigger is complete: no text goes on past one."""
    lines = []
    for i, trigger in enumerate(structural_tag.triggers):
        bodies = [
            _tag_lark(tag, len(trigger), spec, special_tokens) for tag in structural_tag.tags if tag.trigger == trigger
        ]
        special = special_tokens.get(trigger)
        if special is None and any(token in trigger for token in special_tokens):
            raise InvalidRequestError(
                f"structural_tag: the trigger {trigger!r} must be a special token, or text without any; "
                "move the rest of it to the structures' begin"
            )
        heads = [] if special is None else [f"FREE_TEXT <[{special.token_id}]>"]
        if special is None or special.is_shown:
            heads.append(f"head_{i}")
            lines.append(f"head_{i}[lazy]: FREE_TEXT {json.dumps(trigger)}")
        lines.append(f"tag_{i}: ({' | '.join(heads)}) ({' | '.join(bodies)})")
    rules = " | ".join(f"tag_{i}" for i in range(len(structural_tag.triggers)))
    start = f"({rules}) | FREE_TEXT" if structural_tag.stop_after_first else f"({rules})* FREE_TEXT"
    return "\n".join([f"start: {start}", _FREE_TEXT, *lines])


def _tags_only_lark(
    structural_tag: StructuralTag, spec: GrammarSpec, special_tokens: Mapping[str, _SpecialToken]
) -> str:
    """Tags only; or `otherwise`, one JSON text; or, without `otherwise`, free text that does not begin with a trigger."""
    tags = " | ".join(_tag_lark(tag, 0, spec, special_tokens) for tag in structural_tag.tags)
    separator = _lark_text(structural_tag.separator or "", special_tokens)
    start = "tag" if structural_tag.stop_after_first else f"tag ({separator} tag)*"
    lines = [f"tag: {tags}"]
    if structural_tag.otherwise is not None:
        lines.append(f"otherwise: {_tag_lark(structural_tag.otherwise, 0, spec, special_tokens)}")
        start = f"({start}) | otherwise"
    elif not structural_tag.at_least_one:
        start += " | OTHER_TEXT"
        triggers = " | ".join(map(json.dumps, structural_tag.triggers))
        lines += [_FREE_TEXT, "OTHER_TEXT: FREE_TEXT & ~TAGGED", rf"TAGGED: /[ \t\r\n]*/ ({triggers}) FREE_TEXT"]
    return "\n".join([f"start: {start}", *lines])


def _tag_lark(tag: Tag, num_written: int, spec: GrammarSpec, special_tokens: Mapping[str, _SpecialToken]) -> str:
    """A tag behind the first `num_written` characters of its `begin`."""
    schema = dict(tag.schema) if isinstance(tag.schema, Mapping) else {} if tag.schema else {"not": {}}
    schema["x-guidance"] = _whitespace_options(spec)
    begin = _lark_text(tag.begin[num_written:], special_tokens)
    return f"{begin} %json {json.dumps(schema)} {_lark_text(tag.end, special_tokens)}"


def _lark_text(text: str, special_tokens: Mapping[str, _SpecialToken]) -> str:
    """A text as a Lark sequence: a special token in it is that token, and not its spelling."""
    parts = []
    start = position = 0
    while position < len(text):
        special = max((token for token in special_tokens if text.startswith(token, position)), key=len, default="")
        if special:
            parts += [json.dumps(text[start:position])] if start < position else []
            parts.append(special_tokens[special].lark(special))
            start = position = position + len(special)
        else:
            position += 1
    parts += [json.dumps(text[start:])] if start < len(text) else []
    return " ".join(parts)


def _one_ofs(spec: GrammarSpec) -> list[str]:
    """The places of `oneOf` in the schemas of the constraint."""
    if spec.kind == "json":
        return keyword_paths(json.loads(spec.text), "oneOf")
    places = (
        (tag.parts, path)
        for tag in parse_structural_tag(spec.text).all_tags
        for path in keyword_paths(tag.schema, "oneOf")
    )
    return [name_place(path, parts, "structural_tag") for parts, path in places]


def _shorten(error: str) -> str:
    """The library's error in one line. Two kinds are replaced by our own words: an error about one of its limits, and one that
    only its authors understand."""
    if _LIMITS.search(error):
        return TOO_COMPLEX
    if "NoExtensionBias" in error:  # of a grammar whose rules refer to each other and never reach a text
        return "no text matches it: a rule or a $ref refers to itself without an end"
    text = " ".join(error.replace("<non-verbose/>", "").split())
    return text if len(text) <= _MAX_ERROR_LENGTH else f"{text[:_MAX_ERROR_LENGTH]}..."
