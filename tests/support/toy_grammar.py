"""A grammar without text: what it admits is a function of its seed and the tokens so far, by a hash.

It shows a scheduler everything that a grammar can do, at once and often: many tokens allowed, few, exactly one (forced), an end
that is one of several, an end that is the only one; and for "dead" seeds a place where nothing is admitted.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial

from inflight.errors import InvalidRequestError
from inflight.structured_output.backend import CompiledGrammar, GrammarBackend, GrammarMatcher, MaskRow
from inflight.structured_output.json_schema import SchemaSupport
from inflight.structured_output.spec import GrammarSpec

EOS = 0


def allowed_tokens(seed: int, tokens: Sequence[int], vocab_size: int) -> list[int]:
    """What may come behind `tokens`; rising. EOS (0) is allowed where the text may end."""
    value = zlib.crc32(repr((seed, tuple(tokens))).encode())
    kind = value % 8
    if seed % 10 == 9 and len(tokens) >= 5:
        return []  # a dead end
    if kind < 3:
        return [1 + (value >> 8) % (vocab_size - 1)]
    if kind == 3 and len(tokens) > 3:
        return [EOS]
    found = {1 + ((value >> 4) * (i + 1)) % (vocab_size - 1) for i in range(12)}
    return sorted(found | ({EOS} if kind == 4 else set()))


class ToyMatcher(GrammarMatcher):
    def __init__(self, seed: int, vocab_size: int) -> None:
        super().__init__(vocab_size, frozenset({EOS}))
        self._seed = seed
        self._tokens: list[int] = []

    def is_accepting(self) -> bool:
        return EOS in self._allowed()

    def error(self) -> str:
        return ""

    def _allowed(self) -> list[int]:
        return allowed_tokens(self._seed, self._tokens, self._vocab_size)

    def _accept(self, token_id: int) -> bool:
        if token_id == EOS or token_id not in self._allowed():
            return False
        self._tokens.append(token_id)
        return True

    def _rollback(self, num_tokens: int) -> None:
        del self._tokens[len(self._tokens) - num_tokens :]

    def _fill_mask(self, row: MaskRow) -> None:
        row.fill(0)
        bits = row.view("uint32")
        for token_id in self._allowed():
            bits[token_id // 32] |= 1 << (token_id % 32)


class ToyBackend(GrammarBackend):
    """Its regular expressions are seeds; "bad" is refused."""

    schema_support = SchemaSupport(frozenset())

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset({EOS})

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar:
        if spec.text == "bad":
            raise InvalidRequestError("bad grammar", "regex")
        return CompiledGrammar(partial(ToyMatcher, int(spec.text), self.vocab_size), size_bytes=1)
