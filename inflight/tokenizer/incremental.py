"""Incremental decoding: turns tokens into text one by one, at constant cost for each token.

If all returned pieces of text are joined, the result is:

- `ByteLevelDecoder`: exactly `tokenizer.decode(output)`, where `output` is any token ids. Bytes that are not UTF-8 become "�"
  by the rule that both Python and Rust follow: one "�" for each maximal part of a character (Unicode 15, section 3.9).
- `WindowDecoder` (for all other tokenizers): `decode(prompt + output)` without its first `len(decode(prompt))` characters. So a
  word that follows the prompt keeps its space. There is one difference from `decode`, in a run of byte tokens
  (<0xE2><0x82><0xAC>). The decoder returns each character when it is complete, and a byte that belongs to no character
  becomes one "�". But if a run has such a byte, `decode` turns every byte of the run into "�". To do the same, a decoder
  would have to hold back every run until it ends.

Skipped special tokens have no effect: the bytes before and after such a token are joined, as in `decode`.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inflight.tokenizer.tokenizer import Tokenizer

REPLACEMENT = "�"
_MAX_PENDING = 8  # if the text of so many pending tokens still ends in "�", it is returned
_EACH_BYTE = "inflight.replace_each_byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """Handles errors of Python's decoders: each byte that is part of no character becomes one "�"."""
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


class IncrementalDecoder(ABC):
    """The decoder of one sequence. `push` must not be called after `flush`."""

    @abstractmethod
    def push(self, token_id: int) -> str:
        """Returns the new text that later tokens cannot change; "" while a character is incomplete."""

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Pushes all these tokens, and returns the new text that later tokens cannot change."""
        return "".join(map(self.push, token_ids))

    @abstractmethod
    def flush(self) -> str:
        """Returns the text that was held back. An incomplete character becomes "�"."""


class ByteLevelDecoder(IncrementalDecoder):
    """For vocabularies whose tokens are bytes: decodes the bytes of all tokens as one UTF-8 text."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return "" if token_id in self._skipped else self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def push_all(self, token_ids: Sequence[int]) -> str:
        skipped, token_bytes = self._skipped, self._tokenizer.token_bytes
        return self._utf8.decode(b"".join([token_bytes(each) for each in token_ids if each not in skipped]))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDecoder(IncrementalDecoder):
    """For all other vocabularies: decodes a window of tokens with and without the newest ones. The new text is the difference.

    ... emitted earlier | context | pending |
                          decode(context) = context_text
                          decode(context + pending) = context_text + the new text
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int], context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._context = list(context)
        self._context_text = self._decode(self._context)
        self._pending: list[int] = []
        self._bytes = codecs.getincrementaldecoder("utf-8")(_EACH_BYTE)

    def push(self, token_id: int) -> str:
        if token_id in self._skipped or self._tokenizer.id_to_piece(token_id) is None:
            return ""
        byte = self._tokenizer.byte_fallback(token_id)
        # An ASCII byte at the start of a text goes through `decode` below, because `decode` may strip it (a leading space).
        if byte is not None and (byte >= 0x80 or self._context):
            text = self._take_pending() + self._bytes.decode(bytes([byte]))
            self._set_context([token_id])
            return text
        broken = self._bytes.decode(b"", final=True)
        self._pending.append(token_id)
        text = self._new_text()
        if text.endswith(REPLACEMENT) and len(self._pending) < _MAX_PENDING:
            return broken
        self._advance()
        return broken + text

    def flush(self) -> str:
        return self._take_pending() + self._bytes.decode(b"", final=True)

    def _take_pending(self) -> str:
        if not self._pending:
            return ""
        text = self._new_text()
        self._advance()
        return text

    def _new_text(self) -> str:
        return self._decode(self._context + self._pending)[len(self._context_text) :]

    def _advance(self) -> None:
        self._set_context(self._pending)
        self._pending = []

    def _set_context(self, context: list[int]) -> None:
        self._context = context
        self._context_text = self._decode(context)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
