"""Grammars by llguidance (github.com/guidance-ai/llguidance), a Rust library: an Earley parser, and a lexer that works with
derivatives of regexes.

The library reads tokenizer.json, so it knows which tokens the tokenizer chooses for a text. If the grammar admits only one text
at a position, the library allows only the token that the tokenizer would choose there.

Limits: the library builds the states of a grammar's regexes while it computes masks, and the number of states has no bound. It
counts this work as "fuel". If a matcher needs more fuel, lexer states or parser items than `_limits` allows, it fails.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark
from llguidance.numpy import fill_next_token_bitmask_par

from inflight.errors import ConfigError, InvalidRequestError
from inflight.structured_output.backend import (
    ALL_ALLOWED,
    NEVER_ENDS,
    TOO_COMPLEX,
    CompiledGrammar,
    GrammarBackend,
    GrammarMatcher,
    MaskJob,
    MaskRow,
    MaskRows,
    one_line,
)
from inflight.structured_output.json_schema import SchemaSupport, name_place, subschemas
from inflight.structured_output.patterns import pattern_search
from inflight.structured_output.spec import GrammarSpec
from inflight.structured_output.structural_tag import Tag, parse_structural_tag
from inflight.structured_output.tagged_object import TaggedObject
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
_NONCHARACTER = "\U0010ffff"  # Unicode has reserved it for internal use
_FREE_TEXT = r"FREE_TEXT: /(.|\n)*/"
_ASCII_CLASSES = "dws"  # the classes \d, \w and \s match only ASCII, as in JSON Schema's patterns
_LIMITS = re.compile(r"current row has|too many (items|expressions|states|rows)|fuel|too (large|big)", re.IGNORECASE)


def _limits() -> LLParserLimits:
    """With these limits the first mask of a grammar needs at most 0.1 s, a later mask at most 10 ms, and a matcher at most
    100 MB.

    Errors are not verbose, because verbose errors would quote the output of other requests. Large lexemes (the lexer's tokens)
    are computed when the grammar is compiled. So a grammar whose lexemes are too large fails when it is compiled.
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
    """A special token. Ordinary tokens that spell the same text are not the same. If `is_shown` is true (for example for
    <tool_call>), a grammar with this text admits both the special token and the ordinary tokens."""

    token_id: int
    is_shown: bool

    def lark(self, text: str) -> str:
        if self.is_shown:
            return f"(<[{self.token_id}]> | {json.dumps(text)})"
        return f"<[{self.token_id}]>"


def _find_unenforced(schema: Mapping[str, Any]) -> list[tuple[str, str]]:  # Any: JSON
    """The library does not know that a key is there already if it is not one of `properties`: it may come again, so it counts
    twice. And where a pattern matches one of `properties`, a text may end in the middle."""
    found = []
    patterns, own = schema.get("patternProperties"), schema.get("properties")
    if isinstance(patterns, Mapping) and isinstance(own, Mapping):
        for pattern in patterns:
            if name := next(filter(pattern_search(pattern), own), None):
                found.append(("patternProperties", f"is not supported: {pattern!r} matches the property {name!r}"))
    least, required = schema.get("minProperties"), schema.get("required")
    num_certain = len(set(required)) if isinstance(required, list) else 0
    is_open = schema.get("additionalProperties") is not False or bool(patterns)
    if isinstance(least, int) and least > num_certain + 1 and is_open:
        found.append(("minProperties", f"is not supported above {num_certain + 1}: further properties may be repeated"))
    return found


class LLGuidanceBackend(GrammarBackend):
    """It releases Python's GIL while it fills the masks of a step.

    Raises:
        ConfigError: the tokenizer is neither byte-level nor sentencepiece-like with byte fallback.
    """

    schema_support = SchemaSupport(
        frozenset(_KEYWORDS.split()), frozenset(_FORMATS.split()), find_unenforced=_find_unenforced
    )

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        super().__init__(tokenizer, vocab_size, eos_token_ids)
        try:
            hidden = _hide_special_tokens(tokenizer.to_json())
            self._tokenizer = LLTokenizer(hidden, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        except ValueError as error:
            raise ConfigError(f"structured outputs cannot use this model's tokenizer: {error}") from error
        self._special_tokens = {
            piece: _SpecialToken(token_id, token_id not in tokenizer.all_special_ids)
            for token_id in range(self._tokenizer.vocab_size)
            if self._tokenizer.is_special_token(token_id) and (piece := tokenizer.id_to_piece(token_id))
        }
        self._executor = LLExecutor(1)

    def fill_masks(self, jobs: Sequence[MaskJob], rows: MaskRows) -> None:
        matchers: list[LLGuidanceMatcher] = []
        wanted: list[tuple[LLMatcher, int]] = []
        for job in jobs:
            matcher = job.matcher
            assert isinstance(matcher, LLGuidanceMatcher)
            if job.draft_token_ids or matcher.is_terminated() or matcher.error():
                matcher.fill_masks_along(job.draft_token_ids, rows[job.rows])
            else:
                matchers.append(matcher)
                wanted.append((matcher.inner, job.first_row))
        if wanted:
            fill_next_token_bitmask_par(self._executor, wanted, rows)
        for matcher in matchers:
            matcher.mask_was_filled()
        for job in jobs:
            if job.matcher.error():
                rows[job.rows].fill(ALL_ALLOWED)

    @classmethod
    def why_refused(cls, schema: object) -> str:
        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
            return str(LLMatcher.validate_grammar(grammar, None))
        except Exception as error:  # the library raises no more specific class
            return str(error)

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar:
        grammar = self._grammar(spec)
        inner = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_limits())
        if not inner.is_error():
            inner.compute_bitmask()  # the lexer states built here are copied to every request's matcher
        if inner.is_error():
            raise InvalidRequestError(f"{spec.subject}: {self._explain(spec, inner.get_error())}", spec.subject)

        def matcher() -> LLGuidanceMatcher:  # a copy needs microseconds; `inner` itself accepts no tokens
            return LLGuidanceMatcher(inner.deep_copy(), self.vocab_size, self.eos_token_ids)

        # A lexer state needs about 2 kB, but the library does not report the number of states. So the size is a guess.
        return CompiledGrammar(matcher, size_bytes=64 * len(grammar))

    def _grammar(self, spec: GrammarSpec) -> str:
        """The constraint in llguidance's own notation."""
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
                    return LLMatcher.grammar_from_lark(_LarkWriter(spec, self._special_tokens).write())
                case _:
                    return LLMatcher.grammar_from_lark(any_to_lark(spec.text))
        except InvalidRequestError:
            raise
        except Exception as error:  # the library's parser of GBNF raises no more specific class
            raise InvalidRequestError(f"{spec.kind}: {error}", spec.kind) from error

    def _explain(self, spec: GrammarSpec, error: str) -> str:
        if "coerce_one_of" in error and spec.kind in ("json", "structural_tag"):
            places = ", ".join(_one_ofs(spec))
            return f"a value could match two branches of a oneOf ({places}): make them exclude each other, or use anyOf"
        return _shorten(error)


class LLGuidanceMatcher(GrammarMatcher):
    """`inner` is the library's matcher. It never gets the EOS that ends the text, because the library cannot always roll an EOS
    back."""

    def __init__(self, inner: LLMatcher, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        super().__init__(vocab_size, eos_token_ids)
        self.inner = inner
        self._token_ids: list[int] = []  # accepted
        self._accepted_before: list[int] = []  # tokens that were rolled back; the next one is the last of the list
        self._has_mask = True  # whether a mask was computed at this position; the compilation has computed the first

    def is_accepting(self) -> bool:
        return bool(self.inner.is_accepting())

    def error(self) -> str:
        return _shorten(self.inner.get_error()) if self.inner.is_error() else ""

    def mask_was_filled(self) -> None:
        """The backend has filled a mask at this position."""
        self._has_mask = True

    def forced_tokens(self, limit: int) -> list[int]:
        # Usually no token is forced. `compute_ff_tokens` shows this without a mask, but it ignores that EOS may be allowed.
        needs_mask = self.error() or self.is_terminated() or self.is_accepting() or self.inner.compute_ff_tokens()
        return super().forced_tokens(limit) if needs_mask else []

    def _accept(self, token_id: int) -> bool:
        """Only a mask renews the fuel. Without fuel the library refuses tokens that the grammar admits. So a mask is computed
        first, unless there was one at this position, or the token was accepted here before, which needs no fuel again."""
        if self._accepted_before[-1:] == [token_id]:
            self._accepted_before.pop()
        else:
            self._accepted_before.clear()
            if not self._has_mask:
                self.inner.compute_bitmask()
        self._has_mask = False
        if self.inner.try_consume_tokens([token_id]) != 1:
            self._has_mask = True
            return False
        self._token_ids.append(token_id)
        return True

    def _rollback(self, num_tokens: int) -> None:
        self.inner.rollback(num_tokens)
        self._accepted_before += reversed(self._token_ids[-num_tokens:])
        del self._token_ids[-num_tokens:]
        self._has_mask = False

    def _fill_mask(self, row: MaskRow) -> None:
        self.inner.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._has_mask = True


def _hide_special_tokens(tokenizer_json: str) -> str:
    """The same tokenizer, in which the special tokens have texts that no grammar contains.

    The library chooses the tokens of a text that a grammar forces as the tokenizer would, so it would write the text "<think>"
    as the special token. But it admits a special token only where the grammar names the token itself. With other texts for
    these tokens it spells such a text with ordinary tokens. The library takes every added token for special whose text is
    between angle brackets.
    """
    state = json.loads(tokenizer_json)
    renamed: dict[str, str] = {}
    for token in state["added_tokens"]:
        text = token["content"]
        if token["special"] or (text.startswith("<") and text.endswith(">")):
            renamed[text] = token["content"] = f"{_NONCHARACTER}{token['id']}{_NONCHARACTER}"
            token["special"] = True
    model = state["model"]
    if isinstance(model.get("vocab"), list):
        model["vocab"] = [[renamed.get(piece, piece), score] for piece, score in model["vocab"]]
    elif "vocab" in model:
        model["vocab"] = {renamed.get(piece, piece): token_id for piece, token_id in model["vocab"].items()}
    if (unknown := model.get("unk_token")) is not None:
        model["unk_token"] = renamed.get(unknown, unknown)
    return json.dumps(state, ensure_ascii=False)


def _whitespace_options(spec: GrammarSpec) -> JsonCompileOptions:
    if spec.whitespace:
        return {"whitespace_pattern": spec.whitespace}
    item, key = spec.separators
    return {"whitespace_flexible": False, "item_separator": item, "key_separator": key}


class _LarkWriter:
    """Writes a structural tag in llguidance's own notation."""

    def __init__(self, spec: GrammarSpec, special_tokens: Mapping[str, _SpecialToken]) -> None:
        self._tag = parse_structural_tag(spec.text)
        self._json_options = _whitespace_options(spec)
        self._special_tokens = special_tokens
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if special_tokens else None
        self._object_rules: list[str] = []

    def write(self) -> str:
        lines = self._free_text() if self._tag.separator is None else self._tags_only(self._tag.separator)
        return "\n".join(lines + self._object_rules)

    def _free_text(self) -> list[str]:
        """The rules of free text with tags, one rule for each trigger. A lazy terminal ends as soon as its trigger is complete,
        so after a trigger only a tag can follow, not more free text."""
        lines = []
        for i, trigger in enumerate(self._tag.triggers):
            bodies = [self._structure(tag, len(trigger)) for tag in self._tag.tags if tag.begin.startswith(trigger)]
            special = self._special_tokens.get(trigger)
            if special is None and any(token in trigger for token in self._special_tokens):
                raise InvalidRequestError(
                    f"structural_tag: the trigger {trigger!r} must be a special token, or text without special tokens; "
                    "move the rest of the trigger to the `begin` of the structures",
                    "structural_tag",
                )
            heads = [] if special is None else [f"FREE_TEXT <[{special.token_id}]>"]
            if special is None or special.is_shown:
                heads.append(f"head_{i}")
                lines.append(f"head_{i}[lazy]: FREE_TEXT {json.dumps(trigger)}")
            lines.append(f"tag_{i}: ({' | '.join(heads)}) ({' | '.join(bodies)})")
        rules = " | ".join(f"tag_{i}" for i in range(len(self._tag.triggers)))
        start = f"({rules}) | FREE_TEXT" if self._tag.stop_after_first else f"({rules})* FREE_TEXT"
        return [f"start: {start}", _FREE_TEXT, *lines]

    def _tags_only(self, separator: str) -> list[str]:
        """The rules of a text that has only tags. If `otherwise` is set, the text may be that structure instead. If neither
        `otherwise` nor `at_least_one` is set, the text may also be free text that does not begin with a trigger."""
        start = "tag" if self._tag.stop_after_first else f"tag ({self._text(separator)} tag)*"
        lines = [f"tag: {' | '.join(self._structure(tag, 0) for tag in self._tag.tags)}"]
        if self._tag.otherwise is not None:
            lines.append(f"otherwise: {self._structure(self._tag.otherwise, 0)}")
            start = f"({start}) | otherwise"
        elif not self._tag.at_least_one:
            start += " | OTHER_TEXT"
            triggers = " | ".join(map(json.dumps, self._tag.triggers))
            lines += [_FREE_TEXT, "OTHER_TEXT: FREE_TEXT & ~TAGGED", rf"TAGGED: /[ \t\r\n]*/ ({triggers}) FREE_TEXT"]
        return [f"start: {start}", *lines]

    def _structure(self, tag: Tag, num_written: int) -> str:
        """The rule of a structure, without the first `num_written` characters of its `begin`."""
        begin = self._text(tag.begin[num_written:])
        end = self._text(tag.end)
        if tag.arguments is not None:
            name = f"object_{len(self._object_rules)}"
            tagged = TaggedObject(name, tag, self._text, self._closed, self._json_options)
            whole = f"{begin} {tagged.write()} {end}"
            self._object_rules += tagged.rules
            return whole
        schema = dict(tag.schema) if isinstance(tag.schema, Mapping) else {} if tag.schema else {"not": {}}
        schema["x-guidance"] = self._json_options
        return f"{begin} %json {json.dumps(schema)} {end}"

    def _closed(self, rule: str, text: str, closing: str) -> tuple[str, list[str]]:
        """Returns a sequence, and the rules that it needs: the terminal `text`, then the text `closing`, which ends it. A lazy
        terminal ends where `closing` is complete.

        Args:
            rule: the name of the new rule.
        """
        found = None if self._special is None else self._special.search(closing)
        if found is None:
            return rule, [f"{rule}[lazy]: {text} {json.dumps(closing)}"]
        special = self._special_tokens[found[0]]
        before = closing[: found.start()]
        heads = [f"{rule.upper()}_HEAD <[{special.token_id}]>"]
        rules = [f"{rule.upper()}_HEAD: {text} {json.dumps(before)}"]
        if special.is_shown:
            heads.append(rule)
            rules.append(f"{rule}[lazy]: {text} {json.dumps(closing[: found.end()])}")
        return f"({' | '.join(heads)}) {self._text(closing[found.end() :])}", rules

    def _text(self, text: str) -> str:
        """A text as a Lark sequence. Parts of the text that spell a special token become this token."""
        pieces = [text] if self._special is None else filter(None, self._special.split(text))
        tokens = self._special_tokens
        return " ".join(
            tokens[piece].lark(piece) if piece in tokens else json.dumps(piece) for piece in pieces if piece
        )


def _one_ofs(spec: GrammarSpec) -> list[str]:
    """The places of `oneOf` in the schemas of the constraint."""

    def paths(schema: object) -> list[str]:
        return sorted(f"{path}/oneOf" for path, node in subschemas(schema) if "oneOf" in node)

    if spec.kind == "json":
        return paths(json.loads(spec.text))
    tags = parse_structural_tag(spec.text).all_tags
    return [str(name_place(path, tag.parts, "structural_tag")) for tag in tags for path in paths(tag.schema)]


def _shorten(error: str) -> str:
    """The library's error in one line. Errors about the library's limits, and one error that is hard to understand, are
    replaced by our own messages."""
    if _LIMITS.search(error):
        return TOO_COMPLEX
    if "NoExtensionBias" in error:  # the rules of the grammar refer to each other and never reach a text
        return NEVER_ENDS
    return one_line(error.replace("<non-verbose/>", ""))
