"""`NgramProposer`: what followed the last tokens where they occurred before (prompt lookup).

The longest of the n-grams at the end that has occurred counts. Where it occurred several times, it is the latest occurrence
that is followed by as many tokens as a step can try: near the end of the text is what the end resembles most. A text that
repeats a short cycle occurred last just before its end, with next to nothing behind it: hence "as many as"; and where none has
as many, the earliest, which has the most.
"""

from __future__ import annotations

import numpy as np

from inflight.config.engine import SpeculativeConfig
from inflight.interface.request import Int32Array
from inflight.spec_decode.proposer import NO_TOKEN, Proposer


class NgramProposer(Proposer):
    """Stateless. One pass over a sequence for each n up to the longest that occurred; numpy, no loop over tokens."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self.num_speculative_tokens = config.num_speculative_tokens
        self._min, self._max = config.prompt_lookup_min, config.prompt_lookup_max
        assert 1 <= self._min <= self._max, f"n is in [{self._min}, {self._max}]"

    def propose(self, token_ids: Int32Array, slots: Int32Array, num_tokens: Int32Array) -> Int32Array:
        drafts = np.full((len(slots), self.num_speculative_tokens), NO_TOKEN, dtype=np.int32)
        max_model_len = token_ids.shape[1]
        for row, slot, length in zip(drafts, slots.tolist(), num_tokens.tolist(), strict=True):
            room = min(self.num_speculative_tokens, max_model_len - length - 1)
            if room > 0:
                found = self._followers(token_ids[slot, :length], room)
                row[: len(found)] = found
        return drafts

    def _followers(self, tokens: Int32Array, count: int) -> Int32Array:
        """At most `count` tokens that followed the last n-gram where it occurred before; none where it did not."""
        length = len(tokens)
        # occurs[i]: the last n tokens stand at [i, i + n) too, and a token follows them
        occurs = tokens[:-1] == tokens[-1]
        starts, n = None, 1
        while occurs.any():
            if n >= self._min:
                starts, size = occurs, n
            if n == self._max:
                break
            n += 1
            occurs = occurs[1:] & (tokens[: length - n] == tokens[length - n])
        if starts is None:
            return tokens[:0]
        found = np.flatnonzero(starts)
        num_long = int(found.searchsorted(length - count - size, side="right"))  # those with `count` tokens behind them
        begin = int(found[max(num_long - 1, 0)]) + size
        return tokens[begin : begin + count]
