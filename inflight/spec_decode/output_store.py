"""`OutputStore`: the outputs of earlier and running requests, and where the last tokens of a sequence occur in them.

An output is stored while it is drawn, in segments of 64 tokens. When all segments are in use, the oldest one is used again. A
cell is the place of one token in a segment. Each cell with a token of an output is in one chain for each length in `CONTEXTS`:

    hash of the 2, 4 or 8 tokens before the token ─▶ heads: the newest cell ─▶ previous: an older cell ─▶ ... ─▶ 0

Other tokens may have the same hash, and a segment may have been used again after its cells got into chains. So the tokens
before each cell that is found are compared. All arrays together have a fixed size, of which only the pages that are used need
memory.
"""

from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from inflight.interface.request import Int32Array
from inflight.spec_decode.adaptive import Match
from inflight.spec_decode.proposer import NO_TOKEN

SEGMENT_BITS = 6
SEGMENT_SIZE = 1 << SEGMENT_BITS  # tokens
CONTEXTS = (2, 4, 8)  # tokens; the contexts of these lengths are found
NUM_NEWEST = (
    16  # how many cells are examined for a request: those of the longest contexts, and the newest of each chain
)
CELL_BYTES = 4 + 8 * len(CONTEXTS)  # a token, and a link and a head for each length of context
_NONE = -2  # where a sequence has no token; differs from all tokens and from NO_TOKEN
# The hash of 2 tokens is a sum of products; that of 4 or 8 tokens is made of the hashes of their halves. All are modulo 2^60.
# Any odd numbers with well-mixed bits are good factors.
_HASH_BITS = 60
_MASK = (1 << _HASH_BITS) - 1
_FACTORS = (0x9E3779B97F4A7C1, 0xC2B2AE3D27D4EB5, 0xFF51AFD7ED558CD)
_MIX = 0x4CF5AD432745937


@dataclass(slots=True)
class _Writer:
    """Where the next token of a running request is written."""

    num_tokens: int  # of the sequence; the tokens before are stored, or belong to the prompt
    salt: int
    request: int = 0  # the number of the request; 0 before its first token
    segment: int = 0
    offset: int = SEGMENT_SIZE
    last: int = 0  # the token before the next one
    # hashes of the newest 2 and 4 tokens before the next token, and before each of the tokens before it
    pairs: list[int] = field(default_factory=lambda: [0] * 2)
    quads: list[int] = field(default_factory=lambda: [0] * 4)
    heads: tuple[int, ...] = ()  # of each context before the next token: where the newest cell of its chain is


class OutputStore:
    """
    Args:
        num_bytes: the size of all arrays is at most this.
        max_requests: only the outputs of the requests that began last are found, at most so many.
        depth: the most tokens that are compared before a place, less than `SEGMENT_SIZE`.
        num_following: the most tokens behind a place, at most `SEGMENT_SIZE`.
    """

    def __init__(self, num_bytes: int, max_requests: int, depth: int, num_following: int) -> None:
        assert depth < SEGMENT_SIZE >= num_following, f"depth={depth}, num_following={num_following}"
        num_segments = 1 << (num_bytes // CELL_BYTES // SEGMENT_SIZE).bit_length() - 1
        assert num_segments >= 4, f"{num_bytes} bytes are too few"
        self._max_requests = max_requests
        self._depth = depth
        self._num_segments = num_segments
        num_cells = num_segments * SEGMENT_SIZE
        # segment 0, which has no tokens, and cell 0 stand for "none"
        self._tokens = np.zeros(num_cells, dtype=np.int32)
        self._tokens[:SEGMENT_SIZE] = NO_TOKEN
        self._heads = np.zeros(len(CONTEXTS) * num_cells, dtype=np.int32).data
        self._previous = np.zeros((num_cells, len(CONTEXTS)), dtype=np.int32).data
        self._shift = _HASH_BITS - num_cells.bit_length() + 1
        # of each segment: the request whose tokens it has, its salt, and the segments with the tokens before and behind
        self._requests = [0] * num_segments
        self._salts = [0] * num_segments
        self._before = [0] * num_segments
        self._behind = [0] * num_segments
        # [num_segments, 3]: how far the tokens before, in and behind a segment are from the cells before, in and behind it
        self._moves = np.zeros((num_segments, 3), dtype=np.int64)
        self._num_taken = 0
        self._num_requests = 0
        self._writers: dict[int, _Writer] = {}  # by slot
        # the cells that are compared, one more that always differs, and the cells behind
        before = np.arange(-1, -depth - 2, -1)
        behind = np.arange(num_following)
        self._around = np.concatenate([before, behind])

    def begin(self, slot: int, num_tokens: int, cache_salt: str) -> None:
        """The slot has a new sequence. Only tokens that are added to its first `num_tokens` tokens are stored. So of a request
        that was preempted and begins again, no token is stored twice. Only requests with the same `cache_salt` find them."""
        salt = 0
        if cache_salt:
            digest = blake2b(cache_salt.encode(), digest_size=8).digest()
            salt = int.from_bytes(digest)
        self._writers[slot] = _Writer(num_tokens, salt)

    def add_and_match(self, token_ids: Int32Array, slots: Int32Array, num_tokens: Int32Array) -> list[list[Match]]:
        """Store the tokens that the sequences got since the last call. The arguments are those of `Proposer.propose`.

        Returns:
            For each sequence the places in outputs of other requests where at least two tokens before the place are the last
            tokens of the sequence. Of equally long matches, those of newer outputs come first.
        """
        writers = [self._writers[slot] for slot in slots.tolist()]
        last = np.full((len(writers), self._depth + 1), _NONE, dtype=np.int32)  # the last tokens, the newest first
        for row, (writer, slot, length) in enumerate(zip(writers, slots.tolist(), num_tokens.tolist(), strict=True)):
            self._add(writer, token_ids[slot, :length])
            first = max(length - self._depth, 0)
            newest = token_ids[slot, first:length][::-1]
            last[row, : len(newest)] = newest
        matches: list[list[Match]] = [[] for _ in writers]
        rows = list[int]()
        cells = list[int]()
        for row, writer in enumerate(writers):
            found = self._find(writer)
            rows += [row] * len(found)
            cells += found
        if not cells:
            return matches
        at = np.array(cells)
        places = at[:, None] + self._around
        # 3 * segment + (0, 1 or 2): whether a place would be in the cells before, in or behind the segment
        moves = (places >> SEGMENT_BITS) + ((at >> SEGMENT_BITS) * 2 + 1)[:, None]
        places += self._moves.take(moves)
        windows = self._tokens.take(places)  # [num_cells, depth + 1 + num_following]
        compared = self._depth + 1
        differs = windows[:, :compared] != last[rows]
        lengths = differs.argmax(axis=1).tolist()
        texts = windows[:, compared:].tolist()
        for row, length, following in zip(rows, lengths, texts, strict=True):
            if length >= CONTEXTS[0] and following[0] != NO_TOKEN:
                end = following.index(NO_TOKEN) if NO_TOKEN in following else len(following)
                matches[row].append(Match(length, following[:end]))
        return matches

    def _add(self, writer: _Writer, tokens: Int32Array) -> None:
        if not writer.request:
            # The end of the prompt is stored, too, so that the places at the beginning of the output have tokens before them.
            # No chain has its cells.
            self._num_requests += 1
            writer.request = self._num_requests
            for token in tokens[max(writer.num_tokens - self._depth, 0) : writer.num_tokens].tolist():
                self._tokens[self._next_cell(writer)] = token
            for token in tokens[: writer.num_tokens][-max(CONTEXTS) :].tolist():
                self._move(writer, token)
        for token in tokens[writer.num_tokens :].tolist():
            cell = self._next_cell(writer)
            self._tokens[cell] = token
            for context, head in enumerate(writer.heads):
                self._previous[cell, context] = self._heads[head]
                self._heads[head] = cell
            self._move(writer, token)
        writer.num_tokens = len(tokens)

    def _move(self, writer: _Writer, token: int) -> None:
        """Make `token` the last one before the next token. Requests with different salts have different chains."""
        pair = writer.last * _FACTORS[0] + (token + 1) * _FACTORS[1] + writer.salt & _MASK
        quad = pair * _FACTORS[2] + writer.pairs[-2] & _MASK
        octet = quad * _FACTORS[2] + writer.quads[-4] & _MASK
        writer.last = token
        writer.pairs = [*writer.pairs[1:], pair]
        writer.quads = [*writer.quads[1:], quad]
        heads = [((each ^ each >> 31) * _MIX & _MASK) >> self._shift for each in (pair, quad, octet)]
        writer.heads = (3 * heads[0], 3 * heads[1] + 1, 3 * heads[2] + 2)

    def _find(self, writer: _Writer) -> list[int]:
        """The cells whose contexts may be the last tokens of the request, those with the longest contexts first."""
        found = dict[int, None]()
        oldest = self._num_requests - self._max_requests
        for context in reversed(range(len(CONTEXTS))):
            cell = self._heads[writer.heads[context]]
            num_visited = 0
            while cell and num_visited < NUM_NEWEST > len(found):
                segment = cell >> SEGMENT_BITS
                request = self._requests[segment]
                if oldest < request != writer.request and self._salts[segment] == writer.salt:
                    found[cell] = None
                cell = self._previous[cell, context]
                num_visited += 1
        return list(found)

    def _next_cell(self, writer: _Writer) -> int:
        if writer.offset == SEGMENT_SIZE or self._requests[writer.segment] != writer.request:
            self._take_segment(writer)
        cell = writer.segment * SEGMENT_SIZE + writer.offset
        writer.offset += 1
        return cell

    def _take_segment(self, writer: _Writer) -> None:
        segment = 1 + self._num_taken % (self._num_segments - 1)
        self._num_taken += 1
        self._link(self._before[segment], 0)
        self._link(0, self._behind[segment])
        self._requests[segment] = writer.request
        self._salts[segment] = writer.salt
        self._tokens[segment * SEGMENT_SIZE : (segment + 1) * SEGMENT_SIZE] = NO_TOKEN
        is_continued = self._requests[writer.segment] == writer.request and writer.segment != segment
        self._link(writer.segment if is_continued else 0, segment)
        self._link(segment, 0)
        writer.segment = segment
        writer.offset = 0

    def _link(self, segment: int, behind: int) -> None:
        """The tokens of `segment` go on in the segment `behind`. Segment 0 stands for none."""
        if segment:
            self._behind[segment] = behind
            self._moves[segment, 2] = (behind - segment - 1) * SEGMENT_SIZE
        if behind:
            self._before[behind] = segment
            self._moves[behind, 0] = (segment - behind + 1) * SEGMENT_SIZE
