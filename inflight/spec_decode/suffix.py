"""`SuffixProposer`: proposes the tokens that followed the last tokens earlier, in the text or in outputs of other requests.

A match is a place in a known text where the tokens before it are the last tokens of the sequence. Matches come from the
sequence itself (`SequenceIndexes`) and from the outputs of other requests (`OutputStore`). Each match votes for the tokens that
followed it, and the proposed text is what most of them voted for, token by token. The longest matches vote first. Shorter
matches also vote if more tokens are then expected to be right: if there are few votes and they differ, or near the end of a
text.

The method is known as suffix decoding (https://arxiv.org/abs/2411.04975). Instead of suffix trees there are chains of places in
arrays, because their size is fixed and adding a place takes constant time.
"""

from collections.abc import Sequence

import numpy as np

from inflight.config.speculative import SpeculativeConfig
from inflight.interface.request import Int32Array
from inflight.interface.step import NewRequestData
from inflight.spec_decode.adaptive import AdaptiveProposer, Match
from inflight.spec_decode.output_store import OutputStore
from inflight.spec_decode.sequence_index import Ends, SequenceIndexes

STORE_BYTES = 64 << 20
MAX_OWN_MATCHES = 8  # in the sequence itself; the longest matches, and of equally long ones the latest
_MAX_COMPARED = 32  # places in the sequence itself whose exact lengths are computed


class SuffixProposer(AdaptiveProposer):
    def __init__(self, config: SpeculativeConfig, device: str, store_bytes: int = STORE_BYTES) -> None:
        super().__init__(config, device)
        k = config.num_speculative_tokens
        depth = config.suffix_decoding_max_tree_depth
        factor = config.suffix_decoding_max_spec_factor
        max_requests = config.suffix_decoding_max_cached_requests
        self._min_prob = config.suffix_decoding_min_token_prob
        self._depth = depth - 1
        # [depth]: for each length of a match the most drafts. A match and its drafts are at most `depth` tokens together. So
        # after a very long match the drafts are those of a shorter one.
        self._most = [0]
        for length in range(1, depth):
            most = min(int(factor * length), depth - length, k)
            self._most.append(max(self._most[-1], most))
        self._back = np.arange(1, depth + 1)
        self._indexes = SequenceIndexes(2)
        self._store = OutputStore(store_bytes, max_requests, self._depth, k) if max_requests else None

    def begin(self, requests: Sequence[NewRequestData]) -> None:
        super().begin(requests)
        for data in requests:
            self._indexes.drop(data.slot)
            if self._store is not None:
                self._store.begin(data.slot, len(data.token_ids), data.cache_salt)

    def find(self, token_ids: Int32Array, slots: Int32Array, num_tokens: Int32Array) -> list[Match]:
        in_store: list[list[Match]] = [[] for _ in slots]
        if self._store is not None and len(slots):
            in_store = self._store.add_and_match(token_ids, slots, num_tokens)
        found = []
        for slot, length, matches in zip(slots.tolist(), num_tokens.tolist(), in_store, strict=True):
            room = min(self.num_speculative_tokens, token_ids.shape[1] - length - 1)
            if room > 0:
                matches = self._own_matches(slot, token_ids[slot, :length]) + matches
                matches.sort(key=lambda match: -match.length)
            found.append(self._choose(matches, room))
        return found

    def _own_matches(self, slot: int, tokens: Int32Array) -> list[Match]:
        """The matches in the sequence itself, the longest first."""
        length = len(tokens)
        ends = _fewer(tokens, self._indexes.ends(slot, tokens), self._depth)[-_MAX_COMPARED:]
        if not len(ends):
            return []
        back = self._back[:length]
        places = ends[:, None] - back
        differs = tokens[places] != tokens[length - back]
        differs |= places < 0
        differs[:, -1] = True  # no more tokens are compared
        lengths = differs.argmax(axis=1)
        ranks = lengths * len(ends) + np.arange(len(ends))
        order = ranks.argsort()[::-1][:MAX_OWN_MATCHES]
        k = self.num_speculative_tokens
        return [
            Match(size, tokens[end : end + k].tolist())
            for size, end in zip(lengths[order].tolist(), ends[order].tolist(), strict=True)
        ]

    def _choose(self, matches: list[Match], room: int) -> Match:
        """Returns the drafts for which the sum of their probabilities is largest, as a match: as many tokens are expected to be
        right.

        Args:
            matches: the longest first.
            room: the most drafts.
        """
        best = Match(0, [])
        expected = 0.0
        for i, match in enumerate(matches):
            most = min(self._most[match.length], room)
            if most <= expected:  # this and all shorter matches cannot have more
                break
            if i + 1 == len(matches) or matches[i + 1].length < match.length:
                voted, their_expected = self._vote([each.following for each in matches[: i + 1]], most)
                if their_expected > expected:
                    best, expected = Match(match.length, voted), their_expected
        return best

    def _vote(self, texts: list[list[int]], most: int) -> tuple[list[int], float]:
        """Returns at most `most` tokens of which each follows the tokens before it in most of the texts, and the sum of their
        probabilities. If two tokens follow equally often, that of the first text is taken."""
        drafts = list[int]()
        expected = 0.0
        probability = 1.0
        while len(drafts) < most:
            at = len(drafts)
            if all(text == texts[0] for text in texts):
                rest = texts[0][at:most]
                return drafts + rest, expected + probability * len(rest)
            counts = dict[int, int]()
            for text in texts:
                if at < len(text):
                    counts[text[at]] = counts.get(text[at], 0) + 1
            if not counts:
                break
            token = max(counts, key=counts.__getitem__)
            probability *= counts[token] / sum(counts.values())
            if probability < self._min_prob:
                break
            drafts.append(token)
            expected += probability
            texts = [text for text in texts if at < len(text) and text[at] == token]
        return drafts, expected


def _fewer(tokens: Int32Array, ends: Ends, depth: int) -> Ends:
    """Returns those of the places with the longest matches, if there are many: the last tokens are compared one by one, until
    at most `_MAX_COMPARED` places are left, or none would be.

    Args:
        ends: all places where the match has at least two tokens, ascending.
        depth: the most tokens that are compared.
    """
    length = len(tokens)
    size = 3
    while len(ends) > _MAX_COMPARED and size <= min(depth, length):
        longer = ends[ends.searchsorted(size) :]
        longer = longer[tokens[longer - size] == tokens[length - size]]
        if not len(longer):
            break
        ends = longer
        size += 1
    return ends
