"""The interface to a grammar library: `GrammarBackend` compiles grammars, and `GrammarMatcher` follows one request's tokens.

A mask is a row of `ceil(vocab_size / 32)` int32 words: bit i % 32 of word i // 32 is 1 if token i may come next. A text ends
with an EOS token. If the text so far is complete, all EOS ids are allowed, otherwise none.

These rules hold for every backend (the conformance suite in `tests/unit/structured_output/` checks them):

- If a token's bit is set, `accept` accepts it. `accept` may also accept a token whose bit is not set: if the grammar admits
  only one text, a backend may set only the bits of the tokens that the tokenizer would choose for this text.
- Masks, acceptance and forced tokens depend only on the grammar and the accepted tokens. After `rollback` everything is as if
  the tokens had never been accepted.
- If a grammar exceeds the limits of the backend, `compile` raises an error, or the matcher fails later and `error()` returns
  the reason.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from inflight.errors import ConfigError, InvalidRequestError
from inflight.structured_output.json_schema import SchemaSupport, find_part, name_place, relax_schema
from inflight.structured_output.merged_patterns import leave_out_merged_patterns
from inflight.structured_output.references import with_local_references
from inflight.structured_output.schema_trial import find_refused, leave_out_refused, never_ends
from inflight.structured_output.spec import RESPONSE_FORMAT, GrammarSpec, SchemaPart, SchemaPlace
from inflight.tokenizer.tokenizer import Tokenizer
from inflight.tokenizer.vocabulary_bytes import vocabulary_bytes

MaskRow = npt.NDArray[np.int32]  # [ceil(vocab_size / 32)], contiguous
MaskRows = npt.NDArray[np.int32]  # [num_rows, ceil(vocab_size / 32)], contiguous

TOO_COMPLEX = "it is too complex: give it fewer alternatives and properties, or shorter repetitions and lengths"

NEVER_ENDS = "no text matches it: a rule or a $ref always refers to itself again, so a text would never end"

ALL_ALLOWED = -1  # every word of a mask that forbids nothing
MAX_ERROR_LENGTH = 500  # characters


def num_mask_words(vocab_size: int) -> int:
    return (vocab_size + 31) // 32


class GrammarMatcher(ABC):
    """One request's position in its grammar. Used by one thread at a time.

    This class handles EOS for every backend: EOS is accepted when the text is complete, and nothing is accepted after it.
    """

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._num_inner = 0  # how many tokens the library has accepted; it never gets the EOS that ends the text
        self._is_terminated = False  # whether this EOS was accepted

    @property
    def num_accepted(self) -> int:
        """The number of tokens accepted so far, including the EOS."""
        return self._num_inner + self._is_terminated

    def is_terminated(self) -> bool:
        return self._is_terminated

    def accept(self, token_id: int) -> bool:
        """Accept one token. If the grammar does not admit it, return False and change nothing."""
        if self._is_terminated or not 0 <= token_id < self._vocab_size or self.error():
            return False
        if token_id in self._eos_token_ids and self.is_accepting():
            self._is_terminated = True
            return True
        accepted = self._accept(token_id)
        self._num_inner += accepted
        return accepted

    def accept_tokens(self, token_ids: Sequence[int]) -> int:
        """Accept the tokens before the first token that the grammar does not admit. Returns how many were accepted."""
        for i, token_id in enumerate(token_ids):
            if not self.accept(token_id):
                return i
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        """Forget the last `num_tokens` accepted tokens."""
        assert 0 <= num_tokens <= self.num_accepted
        if num_tokens and self._is_terminated:
            self._is_terminated = False
            num_tokens -= 1
        if num_tokens and not self.error():
            self._rollback(num_tokens)
        self._num_inner -= num_tokens

    def fill_mask(self, row: MaskRow) -> None:
        """Write the mask of the next token. After EOS or an error the mask allows all tokens, because nothing more is
        drawn."""
        if not self._is_terminated and not self.error():
            self._fill_mask(row)
            if not self.error():
                return
        row.fill(ALL_ALLOWED)

    def fill_masks_along(self, draft_token_ids: Sequence[int], rows: MaskRows) -> None:
        """Write `len(draft_token_ids) + 1` rows: row i is the mask after the first i drafts. The state does not change.

        If a draft is an EOS, or the grammar does not admit it, the rows after this draft allow all tokens, because no token is
        drawn there.
        """
        num_accepted = 0
        for i in range(len(draft_token_ids) + 1):
            self.fill_mask(rows[i])
            if i == len(draft_token_ids) or not self.accept(draft_token_ids[i]):
                rows[i + 1 :].fill(ALL_ALLOWED)
                break
            num_accepted += 1
        self.rollback(num_accepted)

    def forced_tokens(self, limit: int) -> list[int]:
        """Returns the next tokens, up to the first position where the grammar does not allow exactly one token; at most `limit`
        tokens. The state does not change."""
        forced: list[int] = []
        row = np.empty(num_mask_words(self._vocab_size), dtype=np.int32)
        while len(forced) < limit and not self._is_terminated:
            self.fill_mask(row)
            token_id = single_token_id(row)
            if token_id < 0 or not self.accept(token_id):
                break
            forced.append(token_id)
        self.rollback(len(forced))
        return forced

    @abstractmethod
    def is_accepting(self) -> bool:
        """Whether the text so far is complete, so that EOS is allowed."""

    @abstractmethod
    def error(self) -> str:
        """Why this matcher has failed, or "" if it has not failed. A failed matcher cannot be used again."""

    @abstractmethod
    def _accept(self, token_id: int) -> bool:
        """Accept a token of the vocabulary. The caller has already handled an EOS that ends the text."""

    @abstractmethod
    def _rollback(self, num_tokens: int) -> None: ...

    @abstractmethod
    def _fill_mask(self, row: MaskRow) -> None:
        """Write the mask of the next token. Not called after EOS. A failure must set `error()`, and must not raise."""


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar ready for use, shared by requests and threads.

    Attributes:
        matcher: makes a new matcher, at the start of the text.
        size_bytes: how much memory the grammar uses, for the limit of the cache. It is an estimate if the library does not
            report the size.
    """

    matcher: Callable[[], GrammarMatcher]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class MaskJob:
    """The mask rows of one request in a step. The first row is for the token after the request's text so far. One more row is
    for the token after each of its drafts (guessed tokens)."""

    matcher: GrammarMatcher
    first_row: int
    draft_token_ids: Sequence[int] = ()

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + len(self.draft_token_ids) + 1)


class GrammarBackend(ABC):
    """A grammar library, for one vocabulary.

    Attributes:
        vocab_size: the vocabulary size of the model. Ids without a token are never allowed.
        eos_token_ids: the tokens that end a text.
        schema_support: which parts of JSON Schema the backend enforces.

    Raises:
        ConfigError: the model has no EOS token.
    """

    schema_support: SchemaSupport

    @abstractmethod
    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        if not eos_token_ids:
            raise ConfigError(
                "structured outputs need a model with an EOS token, which ends the text of a grammar; leave them out"
            )
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self._read_texts = partial(vocabulary_bytes, tokenizer)

    def vocabulary_bytes(self) -> list[bytes]:
        """The bytes that each token adds to a text.

        Raises:
            TokenizerError: the tokens have no bytes of their own.
        """
        return self._read_texts()

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile a grammar and compute its first mask, because most grammars that are too large fail at the first mask. This
        is slow. Any thread may call it.

        Raises:
            InvalidRequestError: the constraint is malformed, not supported, too complex, or admits nothing.
        """
        spec, _ = self.relax(spec)
        try:
            compiled = self._compile(spec)
        except InvalidRequestError as error:
            raise self._name_refused(spec, error) from error
        matcher = compiled.matcher()
        row = np.zeros(num_mask_words(self.vocab_size), dtype=np.int32)
        matcher.fill_mask(row)
        if matcher.error():
            raise InvalidRequestError(f"{spec.subject}: {matcher.error()}", spec.subject)
        if not row.any():
            raise InvalidRequestError(f"{spec.subject}: no text satisfies it", spec.subject)
        return compiled

    @classmethod
    def relax(cls, spec: GrammarSpec) -> tuple[GrammarSpec, list[SchemaPlace]]:
        """Check the constraint, and remove the keywords of JSON schemas that this backend cannot enforce. This is the part of
        `compile` that does not use the grammar library.

        Returns:
            the spec to compile, and the places of the removed keywords in its schemas.

        Raises:
            InvalidRequestError: the constraint is malformed or not supported.
        """
        if spec.kind == "json":
            parts = (SchemaPart("#", RESPONSE_FORMAT, is_strict=False),) if spec.is_lenient else ()
            schema, left_out = cls._relax_schema(json.loads(spec.text), parts, "json")
            return replace(spec, text=json.dumps(schema, ensure_ascii=False)), left_out
        if spec.kind == "structural_tag":
            from inflight.structured_output.structural_tag import parse_structural_tag  # needs msgspec

            document = json.loads(spec.text)
            tags = parse_structural_tag(spec.text).all_tags
            structures = [*document["structures"], *([document["otherwise"]] if "otherwise" in document else [])]
            left_out = []
            for i, (tag, structure) in enumerate(zip(tags, structures, strict=True)):
                where = f"structural_tag: structures[{i}].schema, after {tag.begin!r}"
                structure["schema"], places = cls._relax_schema(structure["schema"], tag.parts, where)
                left_out += places
            return replace(spec, text=json.dumps(document, ensure_ascii=False)), left_out
        return spec, []

    @classmethod
    def _relax_schema(
        cls, schema: Any, parts: Sequence[SchemaPart], where: str
    ) -> tuple[Any, list[SchemaPlace]]:  # Any: JSON
        """Returns the schema without what this backend cannot enforce, and the places of what was left out."""
        schema = with_local_references(schema)
        left_out = relax_schema(schema, cls.schema_support, parts, where)
        left_out += leave_out_merged_patterns(schema, parts, where)
        if isinstance(schema, dict):
            left_out += leave_out_refused(schema, cls.why_refused, parts, where)
        if never_ends(schema):
            part = find_part("#", parts)
            if part is None or part.is_strict:
                raise name_place("#", parts, where).refusal(f": {NEVER_ENDS}")
            schema = {"type": schema["type"]} if isinstance(schema.get("type"), str) else {}
            left_out.append(name_place("#", parts, where))
        return schema, left_out

    def _name_refused(self, spec: GrammarSpec, error: InvalidRequestError) -> InvalidRequestError:
        """If a keyword of a schema is the cause of the error, an error that names its place; otherwise the error itself."""
        schemas: list[tuple[Any, Sequence[SchemaPart], str]] = []  # Any: JSON
        if spec.kind == "json":
            schemas = [(json.loads(spec.text), (), spec.kind)]
        elif spec.kind == "structural_tag":
            from inflight.structured_output.structural_tag import parse_structural_tag  # needs msgspec

            schemas = [(tag.schema, tag.parts, spec.kind) for tag in parse_structural_tag(spec.text).all_tags]
        for schema, parts, where in schemas:
            if isinstance(schema, dict) and (reason := self.why_refused(schema)):
                path, node, keyword = find_refused(schema, self.why_refused, reason)
                if node is not None and keyword != "oneOf":  # the backend's own message has all of them
                    return name_place(f"{path}/{keyword}", parts, where).refusal(f": {one_line(reason)}")
        return error

    @classmethod
    def why_refused(cls, schema: object) -> str:
        """Why the library refuses a schema whose keywords it supports; "" if it does not. Needs no tokenizer, and is fast."""
        return ""

    def fill_masks(self, jobs: Sequence[MaskJob], rows: MaskRows) -> None:
        """Write all masks of a step. If a matcher fails, its `error()` returns the reason. Other matchers are not affected."""
        for job in jobs:
            job.matcher.fill_masks_along(job.draft_token_ids, rows[job.rows])

    @abstractmethod
    def _compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile a spec that `relax` has returned."""


def single_token_id(row: MaskRow) -> int:
    """The token that the row allows, or -1 if it allows several tokens or none."""
    words = row.nonzero()[0]
    bits = int(row[words[0]]) & 0xFFFFFFFF if len(words) == 1 else 0
    if bits.bit_count() == 1:
        return int(words[0]) * 32 + bits.bit_length() - 1
    return -1


def allow_only(rows: MaskRows, token_ids: Sequence[int]) -> None:
    """Let row i admit only `token_ids[i]`."""
    rows.fill(0)
    bits = rows.view(np.uint32)
    for row, token_id in zip(bits, token_ids, strict=False):
        row[token_id // 32] = 1 << (token_id % 32)


def one_line(error: str) -> str:
    """A library's error message in one line. A long message is cut, because it may quote the whole grammar."""
    text = " ".join(error.split())
    if len(text) <= MAX_ERROR_LENGTH:
        return text
    return f"{text[:MAX_ERROR_LENGTH]}..."
