"""`TokenTexts`: which tokens of a vocabulary continue, complete or pass the end of a fixed text, as masks."""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from inflight.structured_output.backend import ALL_ALLOWED, MaskRow, num_mask_words

BLANKS = b" \t\r\n"


class TokenTexts:
    """The bytes of each token, sorted, so that the tokens that begin with a text are found without a search of all tokens.

    Attributes:
        blanks: the mask of the tokens that are white space only.
        all_but_eos: the mask of all tokens but those that end a text.

    Args:
        vocabulary: the bytes that each token adds to a text; b"" for an id without a token.
        vocab_size: the number of bits of a mask.
        eos_token_ids: the tokens that end a text. They have no part in it, so no method finds them.
    """

    def __init__(self, vocabulary: Sequence[bytes], vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self.eos_token_ids = frozenset(eos_token_ids)
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._sorted = sorted(
            (text, token_id) for token_id, text in enumerate(vocabulary) if text and token_id not in eos_token_ids
        )
        self.blanks = self.row(token_id for text, token_id in self._sorted if not text.strip(BLANKS))
        self.all_but_eos = np.full(num_mask_words(vocab_size), ALL_ALLOWED, dtype=np.int32)
        self.all_but_eos &= ~self.row(eos_token_ids)

    def row(self, token_ids: Iterable[int]) -> MaskRow:
        """A mask that allows only these tokens."""
        bits = np.zeros(num_mask_words(self._vocab_size), dtype=np.uint32)
        for token_id in token_ids:
            if token_id < self._vocab_size:
                bits[token_id // 32] |= np.uint32(1 << (token_id % 32))
        return bits.view(np.int32)

    def bytes_of(self, token_id: int) -> bytes:
        if token_id < len(self._vocabulary):
            return self._vocabulary[token_id]
        return b""

    def continuing(self, text: bytes) -> list[int]:
        """The tokens that are the beginning of `text`, or that begin with `text`."""
        found = [token_id for end in range(1, len(text)) for token_id in self._equal_to(text[:end])]
        return found + [token_id for _, token_id in self._beginning_with(text)]

    def completing(self, text: bytes) -> list[tuple[int, bytes]]:
        """(token, what the token adds after `text`) for the tokens that begin with `text`."""
        return [(token_id, found[len(text) :]) for found, token_id in self._beginning_with(text)]

    def containing(self, text: bytes) -> list[tuple[int, bytes]]:
        """(token, what the token adds after the first `text`) for the tokens that contain `text`."""
        return [(token_id, found.partition(text)[2]) for found, token_id in self._sorted if text in found]

    def _equal_to(self, text: bytes) -> list[int]:
        first = bisect_left(self._sorted, (text, 0))
        last = bisect_left(self._sorted, (text + b"\0", 0))
        return [token_id for _, token_id in self._sorted[first:last]]

    def _beginning_with(self, text: bytes) -> list[tuple[bytes, int]]:
        first = last = bisect_left(self._sorted, (text, 0))
        while last < len(self._sorted) and self._sorted[last][0].startswith(text):
            last += 1
        return self._sorted[first:last]
