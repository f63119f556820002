"""`WindowDecoder`: turns tokens into text for vocabularies whose tokens are not bytes. incremental.py says what its text is."""

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

from inflight.tokenizer.incremental import IncrementalDecoder

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


class WindowDecoder(IncrementalDecoder):
    """For all other vocabularies: decodes a window of tokens with and without the newest ones. The new text is the difference.

    ... emitted earlier | context | pending |
                          decode(context) = context_text
                          decode(context + pending) = context_text + the new text
    """

    def __init__(self, tokenizer: "Tokenizer", skipped: frozenset[int], context: Sequence[int]) -> None:
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
