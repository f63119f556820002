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

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence


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

    def __init__(self, token_bytes: Callable[[int], bytes], skipped: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return "" if token_id in self._skipped else self._utf8.decode(self._token_bytes(token_id))

    def push_all(self, token_ids: Sequence[int]) -> str:
        skipped, token_bytes = self._skipped, self._token_bytes
        return self._utf8.decode(b"".join([token_bytes(each) for each in token_ids if each not in skipped]))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)
