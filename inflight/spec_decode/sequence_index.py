"""`SequenceIndexes`: where the last tokens of each running sequence occur earlier in the same sequence."""

import numpy as np
import numpy.typing as npt

from inflight.interface.request import Int32Array

MIN_INDEXED = 16384  # tokens; a search through fewer tokens is as fast as an index
# An index is rebuilt when the sequence has grown by more than 1/8 since the index was built. So the rebuilds of an index cost,
# on average, constant time per token.
TAIL_SHARE = 8
_TOKEN_BITS, _END_BITS = 20, 24  # bits of a token, and of a position, in an entry of the index
_TOKEN_MASK = (1 << _TOKEN_BITS) - 1
_END_MASK = (1 << _END_BITS) - 1

Ends = npt.NDArray[np.int64]  # ends of n-grams, ascending; the end of an n-gram is the position of the token after it
NOWHERE: Ends = np.empty(0, dtype=np.int64)


class SequenceIndexes:
    """A short sequence is searched each time. For a long sequence an index is kept (`_Index`, 8 bytes per token). Then `ends`
    looks the n-gram up in the index, and searches only the tokens that are newer than the index.

    Args:
        n: the length of the n-grams, 1 or 2.
    """

    def __init__(self, n: int) -> None:
        assert n in (1, 2), f"n={n}"
        self.n = n
        self._indexes: dict[int, _Index] = {}  # by slot

    def drop(self, slot: int) -> None:
        """Drop the index of a slot's sequence. From now on the slot has another sequence."""
        self._indexes.pop(slot, None)

    def ends(self, slot: int, tokens: Int32Array) -> Ends:
        """Returns the ends of all earlier occurrences of the last n tokens, ascending.

        Args:
            tokens: the whole sequence of the slot. Since the last call for the slot, tokens were only added to it.
        """
        n = self.n
        length = len(tokens)
        if length <= n:
            return NOWHERE
        if length < MIN_INDEXED:
            return _search(tokens, 0, n)
        index = self._indexes.get(slot)
        if index is None or length - index.num_tokens > index.num_tokens // TAIL_SHARE:
            index = self._indexes[slot] = _Index(tokens, n)
        indexed = index.ends(tokens)
        newer = _search(tokens, index.num_tokens - n, n)
        return np.concatenate([indexed, newer]) if len(newer) else indexed


def _search(tokens: Int32Array, begin: int, n: int) -> Ends:
    """The ends of the occurrences of the last n tokens in `tokens[begin:-1]`."""
    occurs = tokens[begin + n - 1 : -1] == tokens[-1]
    if n == 2:
        occurs &= tokens[begin:-2] == tokens[-2]
    ends: Ends = occurs.nonzero()[0] + (begin + n)
    return ends


class _Index:
    """All n-grams of a sequence, for n = 1 or n = 2, except the n-gram at its end. An entry is a 64-bit number: the lowest 20
    bits of each token of the n-gram, then the end of the n-gram. The entries are sorted."""

    def __init__(self, tokens: Int32Array, n: int) -> None:
        self.num_tokens = len(tokens)
        self._n = n
        self._is_exact = int(tokens.max()) <= _TOKEN_MASK
        last = tokens[:-1].astype(np.uint64) & np.uint64(_TOKEN_MASK)
        ngrams = last if n == 1 else last[:-1] << np.uint64(_TOKEN_BITS) | last[1:]
        self.entries = ngrams << np.uint64(_END_BITS) | np.arange(n, len(tokens), dtype=np.uint64)
        self.entries.sort()

    def ends(self, tokens: Int32Array) -> Ends:
        """The ends of all occurrences of the last n tokens. The sequence must begin with the indexed tokens."""
        ngram: list[int] = tokens[-self._n :].tolist()
        number = 0
        for token in ngram:
            number = number << _TOKEN_BITS | token & _TOKEN_MASK
        first = self.entries.searchsorted(np.uint64(number << _END_BITS))
        last = self.entries.searchsorted(np.uint64(number << _END_BITS | _END_MASK), side="right")
        ends: Ends = (self.entries[first:last] & np.uint64(_END_MASK)).view(np.int64)
        if not self._is_exact or max(ngram) > _TOKEN_MASK:  # other tokens may have the same lowest bits
            for back, token in enumerate(reversed(ngram), 1):
                ends = ends[tokens[ends - back] == token]
        return ends
