"""`NgramProposer`: finds the last tokens of the text earlier in the text, and proposes the tokens that followed them there.

The method is called prompt lookup. The proposer searches for the longest n-gram at the end of the text that also occurs
earlier. If this n-gram occurs several times, the proposer looks only at the occurrences that are followed by as many tokens as
a step can verify. Of these it uses the latest, because text near the end is most similar to the end. (In a text that repeats a
short cycle, the very latest occurrence is followed by too few tokens.) If no occurrence is followed by enough tokens, the
proposer uses the earliest occurrence, because the most tokens follow it.
"""

from collections.abc import Sequence

from inflight.config.speculative import SpeculativeConfig
from inflight.interface.request import Int32Array
from inflight.interface.step import NewRequestData
from inflight.spec_decode.adaptive import AdaptiveProposer, Match
from inflight.spec_decode.sequence_index import NOWHERE, Ends, SequenceIndexes

_RECENT = 256  # how many of the newest occurrences are examined first


class NgramProposer(AdaptiveProposer):
    """The occurrences of the last two tokens (or of the last one, if `prompt_lookup_min` is 1) come from `SequenceIndexes`. It
    keeps an index of each long sequence until another request gets the slot (the place in the batch) of its request."""

    def __init__(self, config: SpeculativeConfig, device: str) -> None:
        super().__init__(config, device)
        self._min = config.prompt_lookup_min
        self._max = config.prompt_lookup_max
        assert 1 <= self._min <= self._max, f"prompt_lookup_min={self._min}, prompt_lookup_max={self._max}"
        self._indexes = SequenceIndexes(min(self._min, 2))

    def begin(self, requests: Sequence[NewRequestData]) -> None:
        super().begin(requests)
        for data in requests:
            self._indexes.drop(data.slot)

    def find(self, token_ids: Int32Array, slots: Int32Array, num_tokens: Int32Array) -> list[Match]:
        max_model_len = token_ids.shape[1]
        matches = []
        for slot, length in zip(slots.tolist(), num_tokens.tolist(), strict=True):
            match = Match(0, [])
            room = min(self.num_speculative_tokens, max_model_len - length - 1)
            if room > 0:
                tokens = token_ids[slot, :length]
                n, ends = self._ends(slot, tokens, room)
                if n:
                    # the latest occurrence that `room` tokens follow; if there is none, the earliest occurrence
                    num_long = int(ends.searchsorted(length - room, side="right"))
                    begin = int(ends[max(num_long - 1, 0)])
                    match = Match(n, tokens[begin : begin + room].tolist())
            matches.append(match)
        return matches

    def _ends(self, slot: int, tokens: Int32Array, room: int) -> tuple[int, Ends]:
        """Find the longest n-gram at the end of the sequence that also occurs earlier. Returns n (0: there is none) and the
        ends of its earlier occurrences. `room`: how many drafts are wanted. If so many tokens follow one of the newest
        occurrences, older occurrences may be missing from the result."""
        ends = self._indexes.ends(slot, tokens)
        if len(ends) > _RECENT:
            longest, found = self._longest(tokens, ends[-_RECENT:])
            if longest == self._max and found[0] <= len(tokens) - room:
                return longest, found
        return self._longest(tokens, ends)

    def _longest(self, tokens: Int32Array, ends: Ends) -> tuple[int, Ends]:
        """Find the largest allowed n for which the last n tokens of the sequence also occur earlier. Returns n and the ends of
        these occurrences. If there is no such n, returns 0 and no ends.

        `ends`: the ends of earlier occurrences of the last tokens, as many as `SequenceIndexes` compares.
        """
        length = len(tokens)
        shortest = self._indexes.n
        longest = 0
        found = NOWHERE
        for n in range(shortest, self._max + 1):
            if n > shortest:
                ends = ends[ends.searchsorted(n) :]
                ends = ends[tokens[ends - n] == tokens[length - n]]
            if not len(ends):
                break
            if n >= self._min:
                longest = n
                found = ends
        return longest, found
