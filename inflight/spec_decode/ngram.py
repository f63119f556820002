"""`NgramProposer`: finds the last tokens of the text earlier in the text, and proposes the tokens that followed them there.

The method is called prompt lookup. The proposer searches for the longest n-gram at the end of the text that also occurs
earlier. If this n-gram occurs several times, the proposer looks only at the occurrences that are followed by as many tokens as
a step can verify. Of these it uses the latest, because text near the end is most similar to the end. (In a text that repeats a
short cycle, the very latest occurrence is followed by too few tokens.) If no occurrence is followed by enough tokens, the
proposer uses the earliest occurrence, because the most tokens follow it.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from inflight.config.speculative import SpeculativeConfig
from inflight.interface.request import Int32Array
from inflight.spec_decode.proposer import NO_TOKEN, Proposer

MIN_INDEXED = 16384  # tokens; a search through fewer tokens is as fast as an index
# An index is rebuilt when the sequence has grown by more than 1/8 since the index was built. So the rebuilds of an index cost,
# on average, constant time per token.
TAIL_SHARE = 8
_RECENT = 256  # how many of the newest occurrences are examined first
_TOKEN_BITS, _END_BITS = 20, 24  # bits of a token, and of a position, in an entry of the index
_TOKEN_MASK = (1 << _TOKEN_BITS) - 1
_END_MASK = (1 << _END_BITS) - 1

Ends = npt.NDArray[np.int64]  # ends of n-grams, ascending; the end of an n-gram is the position of the token after it
_NOWHERE: Ends = np.empty(0, dtype=np.int64)


class NgramProposer(Proposer):
    """A short sequence is searched in each step. For a long sequence an index is kept (`_Index`, 8 bytes per token) until
    another request gets the slot (the place in the batch) of its request. Then a step looks up the occurrences of the last two
    tokens in the index, and searches only the tokens that are newer than the index."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self.num_speculative_tokens = config.num_speculative_tokens
        self._min = config.prompt_lookup_min
        self._max = config.prompt_lookup_max
        assert 1 <= self._min <= self._max, f"prompt_lookup_min={self._min}, prompt_lookup_max={self._max}"
        self._indexed_n = min(self._min, 2)  # length of the n-grams in an index
        self._indexes: dict[int, _Index] = {}  # by slot

    def forget(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._indexes.pop(slot, None)

    def propose(self, token_ids: Int32Array, slots: Int32Array, num_tokens: Int32Array) -> Int32Array:
        drafts = np.full((len(slots), self.num_speculative_tokens), NO_TOKEN, dtype=np.int32)
        max_model_len = token_ids.shape[1]
        for row, slot, length in zip(drafts, slots.tolist(), num_tokens.tolist(), strict=True):
            room = min(self.num_speculative_tokens, max_model_len - length - 1)
            if room > 0:
                tokens = token_ids[slot, :length]
                ends = self._ends_in_all(tokens) if length < MIN_INDEXED else self._ends_by_index(slot, tokens, room)
                if len(ends):
                    # the latest occurrence that `room` tokens follow; if there is none, the earliest occurrence
                    num_long = int(ends.searchsorted(length - room, side="right"))
                    begin = int(ends[max(num_long - 1, 0)])
                    found = tokens[begin : begin + room]
                    row[: len(found)] = found
        return drafts

    def _ends_in_all(self, tokens: Int32Array) -> Ends:
        """Find the longest n-gram at the end of the sequence that also occurs earlier, and return the ends of its earlier
        occurrences. Each n needs one search through the sequence."""
        length = len(tokens)
        # occurs[i]: the last n tokens are also at [i, i + n), and a token follows them
        occurs = tokens[:-1] == tokens[-1]
        starts = None
        size = 0
        n = 1
        while occurs.any():
            if n >= self._min:
                starts = occurs
                size = n
            if n == self._max:
                break
            n += 1
            occurs = occurs[1:] & (tokens[: length - n] == tokens[length - n])
        return _NOWHERE if starts is None else starts.nonzero()[0] + size

    def _ends_by_index(self, slot: int, tokens: Int32Array, room: int) -> Ends:
        """Does the same as `_ends_in_all`, with an index. `room`: how many drafts are wanted. If so many tokens follow one of
        the newest occurrences, older occurrences may be missing from the result."""
        n = self._indexed_n
        length = len(tokens)
        index = self._indexes.get(slot)
        if index is None or length - index.num_tokens > index.num_tokens // TAIL_SHARE:
            index = self._indexes[slot] = _Index(tokens, n)
        start = index.num_tokens  # the first end that is not in the index
        in_tail = tokens[start - 1 : length - 1] == tokens[-1]
        if n == 2:
            in_tail &= tokens[start - 2 : length - 2] == tokens[-2]
        indexed = index.ends(tokens)
        ends = np.concatenate([indexed, in_tail.nonzero()[0] + start]) if in_tail.any() else indexed
        if len(ends) > _RECENT:
            longest, found = self._longest(tokens, ends[-_RECENT:])
            if longest == self._max and found[0] <= length - room:
                return found
        return self._longest(tokens, ends)[1]

    def _longest(self, tokens: Int32Array, ends: Ends) -> tuple[int, Ends]:
        """Find the largest allowed n for which the last n tokens of the sequence also occur earlier. Returns n and the ends of
        these occurrences. If there is no such n, returns 0 and no ends.

        `ends`: the ends of earlier occurrences of the last `_indexed_n` tokens.
        """
        length = len(tokens)
        longest = 0
        found = _NOWHERE
        for n in range(self._indexed_n, self._max + 1):
            if n > self._indexed_n:
                ends = ends[ends.searchsorted(n) :]
                ends = ends[tokens[ends - n] == tokens[length - n]]
            if not len(ends):
                break
            if n >= self._min:
                longest = n
                found = ends
        return longest, found


class _Index:
    """All n-grams of a sequence, for n = 1 or n = 2, except the n-gram at its end. An entry is a 64-bit number: the lowest 20
    bits of each token of the n-gram, then the end of the n-gram. The entries are sorted."""

    def __init__(self, tokens: Int32Array, n: int) -> None:
        self.num_tokens = len(tokens)
        self._n = n
        self._is_exact = int(tokens.max()) <= _TOKEN_MASK
        last = tokens[:-1].astype(np.uint64) & np.uint64(_TOKEN_MASK)
        ngrams = last if n == 1 else last[:-1] << np.uint64(_TOKEN_BITS) | last[1:]
        self._entries = ngrams << np.uint64(_END_BITS) | np.arange(n, len(tokens), dtype=np.uint64)
        self._entries.sort()

    def ends(self, tokens: Int32Array) -> Ends:
        """The ends of all occurrences of the last n tokens. The sequence must begin with the indexed tokens."""
        ngram: list[int] = tokens[-self._n :].tolist()
        number = 0
        for token in ngram:
            number = number << _TOKEN_BITS | token & _TOKEN_MASK
        first = self._entries.searchsorted(np.uint64(number << _END_BITS))
        last = self._entries.searchsorted(np.uint64(number << _END_BITS | _END_MASK), side="right")
        ends: Ends = (self._entries[first:last] & np.uint64(_END_MASK)).view(np.int64)
        if not self._is_exact or max(ngram) > _TOKEN_MASK:  # other tokens may have the same lowest bits
            for back, token in enumerate(reversed(ngram), 1):
                ends = ends[tokens[ends - back] == token]
        return ends
