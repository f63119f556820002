"""Grammars by XGrammar (github.com/mlc-ai/xgrammar): a pushdown automaton in C++. It computes most masks at compile time.

XGrammar imports torch and transformers. So it is an optional dependency, and it is imported only when the backend is made.
Masks are passed to it as numpy arrays. If a grammar admits a text, XGrammar allows every sequence of tokens that spells this
text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from inflight.errors import InvalidRequestError
from inflight.structured_output.backend import CompiledGrammar, GrammarBackend, GrammarMatcher, MaskRow, one_line
from inflight.structured_output.json_schema import SchemaSupport, subschemas
from inflight.structured_output.spec import DEFAULT_WHITESPACE, MAX_WHITESPACE, GrammarSpec
from inflight.structured_output.structural_tag import parse_structural_tag
from inflight.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    import xgrammar

# Keywords that the library ignores or approximates are not listed. Keywords for the length and the pattern of strings are not
# listed either, because with these the library admits unescaped control characters in JSON strings.
_KEYWORDS = """
    type enum const anyOf $ref properties additionalProperties required items prefixItems minItems maxItems
    minimum maximum exclusiveMinimum exclusiveMaximum
"""
# If array items may be of any type, the text of the compiled grammar contains this. Strings that come from the user cannot
# contain it, because quotes are escaped in them.
_ANY_ITEMS = '(", " basic_'


class XGrammarBackend(GrammarBackend):
    """XGrammar compiles more slowly than llguidance, but fills masks faster. It enforces only the JSON schema keywords
    `_KEYWORDS`.

    Raises:
        TokenizerError: the tokenizer is neither byte-level nor sentencepiece-like with byte fallback.
    """

    schema_support = SchemaSupport(
        frozenset(_KEYWORDS.split()),
        exclusive={keyword: frozenset(_KEYWORDS.split()) - {keyword} for keyword in ("anyOf", "$ref", "enum", "const")},
    )

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        import xgrammar

        super().__init__(tokenizer, vocab_size, eos_token_ids)
        vocabulary = tokenizer.vocabulary_bytes()
        self._special_tokens = [vocabulary[token_id].decode() for token_id in tokenizer.all_special_ids]
        for token_id in tokenizer.all_special_ids:
            vocabulary[token_id] = b""  # the library treats a token without text as special: no grammar admits it
        info = xgrammar.TokenizerInfo(
            list(vocabulary), xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=list(eos_token_ids)
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._new_inner = xgrammar.GrammarMatcher

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar:
        try:
            inner = self._compile_inner(spec)
        except RuntimeError as error:  # the class or base class of all errors of the library
            raise InvalidRequestError(f"{spec.kind}: {_shorten(error)}") from error

        def matcher() -> XGrammarMatcher:
            return XGrammarMatcher(self._new_inner(inner), self.vocab_size, self.eos_token_ids)

        return CompiledGrammar(matcher, int(inner.memory_size_bytes))

    def _compile_inner(self, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
        if spec.whitespace not in ("", DEFAULT_WHITESPACE):
            raise InvalidRequestError("whitespace_pattern needs the llguidance backend; xgrammar has no such option")
        compiler = self._compiler
        match spec.kind:
            case "json" | "json_object":
                return self._compile_schema(spec.text if spec.kind == "json" else '{"type": "object"}', spec)
            case "regex":
                return compiler.compile_regex(spec.text)
            case "choice":
                choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in spec.choices())
                return compiler.compile_grammar(f"root ::= {choices}")
            case "structural_tag":
                return compiler.compile_structural_tag(self._structural_tag(spec))
            case _:
                if "::=" not in spec.text:
                    raise InvalidRequestError(
                        "grammar: Lark needs the llguidance backend; xgrammar reads GBNF (root ::= ...)"
                    )
                return compiler.compile_grammar(spec.text)

    def _compile_schema(self, schema: str, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
        if max(map(len, spec.separators)) > 1 and (path := _find_composite_literal(json.loads(schema))):
            raise InvalidRequestError(
                f"{spec.kind}: the const or enum at {path} holds an array or object, and xgrammar writes these without "
                "white space: leave out separators, or use the llguidance backend"
            )
        compiled = self._compiler.compile_json_schema(
            schema,
            any_whitespace=bool(spec.whitespace),
            separators=spec.separators,
            strict_mode=False,
            max_whitespace_cnt=MAX_WHITESPACE if spec.whitespace else None,
        )
        if not spec.whitespace and spec.separators[0] != ", " and _ANY_ITEMS in str(compiled.grammar):
            raise InvalidRequestError(
                f"{spec.kind}: with separators={spec.separators} the schema must not admit values of any type, because "
                'xgrammar writes ", " between their items: use separators=(", ", ...), or the llguidance backend'
            )
        return compiled

    def _structural_tag(self, spec: GrammarSpec) -> str:
        if not spec.whitespace:
            raise InvalidRequestError(
                "structural_tag: disable_any_whitespace and separators need the llguidance backend; xgrammar has no such option"
            )
        structural_tag = parse_structural_tag(spec.text)
        for tag in structural_tag.all_tags:
            if tag.arguments is not None:
                raise InvalidRequestError(
                    "this model writes the arguments of calls between tags, and not as JSON, so tool_choice and strict "
                    "tools need the llguidance backend: leave them out, or use this backend"
                )
            for special in self._special_tokens:
                if special in tag.begin or special in tag.end:
                    raise InvalidRequestError(
                        f"structural_tag: {special!r} in begin or end is a special token, which needs the llguidance backend"
                    )
        content = {"type": "json_schema", "max_whitespace_cnt": MAX_WHITESPACE}
        tags = [
            {"type": "tag", "begin": tag.begin, "content": {**content, "json_schema": tag.schema}, "end": tag.end}
            for tag in structural_tag.all_tags
        ]
        otherwise = None if structural_tag.otherwise is None else tags.pop()
        inner = {"tags": tags, "stop_after_first": structural_tag.stop_after_first}
        if structural_tag.separator is None:
            inner |= {"type": "triggered_tags", "triggers": structural_tag.triggers}
        elif structural_tag.at_least_one or otherwise is not None:
            inner |= {"type": "tags_with_separator", "separator": structural_tag.separator, "at_least_one": True}
        else:
            raise InvalidRequestError(
                "structural_tag: a separator without at_least_one needs the llguidance backend; xgrammar has no such option"
            )
        either = inner if otherwise is None else {"type": "or", "elements": [inner, otherwise]}
        return json.dumps({"type": "structural_tag", "format": either})


class XGrammarMatcher(GrammarMatcher):
    """The base class handles the EOS that ends a text. The library never gets it."""

    def __init__(self, inner: xgrammar.GrammarMatcher, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        super().__init__(vocab_size, eos_token_ids)
        self._inner = inner
        self._error = ""
        self._last_word = np.int32(2 ** (vocab_size % 32) - 1 if vocab_size % 32 else -1)

    def is_accepting(self) -> bool:
        return bool(self._inner.is_completed())

    def error(self) -> str:
        return self._error

    def _accept(self, token_id: int) -> bool:
        return token_id not in self._eos_token_ids and bool(self._inner.accept_token(token_id))

    def _rollback(self, num_tokens: int) -> None:
        self._inner.rollback(num_tokens)

    def _fill_mask(self, row: MaskRow) -> None:
        try:
            self._inner.fill_next_token_bitmask(row[None], 0)
            row[-1] &= self._last_word  # clear the bits after the vocabulary, which the library sets
        except RuntimeError as error:
            self._error = _shorten(error)


def _find_composite_literal(schema: object) -> str:
    """The place of the first const or enum that contains a non-empty array or object; "" if there is none."""
    for path, node in subschemas(schema):
        values = [node["const"]] if "const" in node else node.get("enum", ())
        if any(isinstance(value, list | Mapping) and value for value in values):
            return path
    return ""


def _shorten(error: RuntimeError) -> str:
    """The error's message in one line, without the time and the source line, which the library puts before it."""
    return one_line(re.sub(r"^\[[\d:]+\] \S+: ", "", str(error)))
