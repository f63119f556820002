"""The plan that `torch_sdpa` makes of a step, in numpy: which queries attend together, and over which blocks.

Two kinds of work:

    PagedGroup    rows with few query tokens, the same number each (decode: one), and contexts of similar length. One
                  gather and one call serve them all; shorter contexts are padded with a block of their own.
    Chunk         one row with many query tokens, cut into pieces. Its keys are contiguous: those of the step itself
                  (a fresh prompt), or gathered once. A piece sees `[key_start, key_end)` of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from inflight.attention.metadata import AttentionInputs

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

MAX_GROUPED_QUERIES = 16  # rows with more query tokens in the step are chunks
MIN_FILL = 0.75  # a context joins a group if it has this share of the blocks of the group's longest
MAX_GROUP_BYTES = 4 << 20  # keys and values gathered at once: they are still in the cache when they are read
PIECE_TOKENS = 128  # queries per piece: keys behind a piece's last query are not even read


@dataclass(frozen=True, slots=True)
class PagedGroup:
    """`visible[r, i, j]`: query i of row r sees key j of the row's gathered blocks."""

    tokens: Int64Array  # [num_rows, num_queries], indices in the flat batch
    block_ids: Int64Array  # [num_rows, num_blocks]
    visible: BoolArray  # [num_rows, num_queries, num_blocks * block_size]


@dataclass(frozen=True, slots=True)
class Piece:
    """`visible` None means causal, with as many keys as queries."""

    query_start: int
    query_end: int  # in the flat batch
    key_start: int
    key_end: int  # in the chunk's keys
    visible: BoolArray | None  # [num_queries, num_keys]


@dataclass(frozen=True, slots=True)
class Chunk:
    """`block_ids` None: the keys are those of the step, the flat batch's `[token_start, token_end)`."""

    token_start: int
    token_end: int
    block_ids: Int64Array | None  # [num_blocks]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Slots:
    """Slots of the cache as (block, offset in the block)."""

    block_ids: Int64Array
    offsets: Int64Array


def slots_to_write(inputs: AttentionInputs) -> tuple[Slots, Slots]:
    """The slots of the step's tokens, in the flat batch's order; and those to be zeroed.

    To be zeroed: the slots behind a row's last token, in the last block, if this step writes that block's first token.
    """
    size = inputs.block_size
    start = inputs.query_start_loc.astype(np.int64)
    lengths = np.diff(start)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.arange(start[-1]) - start[rows] + inputs.num_computed_tokens[rows]
    written = _slots(inputs, rows, positions)

    ends = inputs.seq_lens.astype(np.int64)
    block_ends = -(-ends // size) * size
    fresh = (block_ends - size >= inputs.num_computed_tokens) & (lengths > 0)
    rest = np.where(fresh, block_ends - ends, 0)
    rows = np.repeat(np.arange(len(rest)), rest)
    positions = np.arange(rest.sum()) - (np.cumsum(rest) - rest)[rows] + ends[rows]
    return written, _slots(inputs, rows, positions)


def _slots(inputs: AttentionInputs, rows: Int64Array, positions: Int64Array) -> Slots:
    block_ids = inputs.block_table[rows, positions // inputs.block_size]
    return Slots(block_ids.astype(np.int64), positions % inputs.block_size)


def plan(
    inputs: AttentionInputs, sliding_window: int | None, *, block_bytes: int
) -> tuple[list[PagedGroup], list[Chunk]]:
    """Split the rows into groups and chunks.

    `block_bytes` is the size of a block of one layer. A fresh prompt that the window covers stays in one piece.
    """
    lengths = np.diff(inputs.query_start_loc)
    grouped = (lengths == 1) | ((lengths <= MAX_GROUPED_QUERIES) & (inputs.num_computed_tokens > 0) & (lengths > 0))
    chunks = [_chunk(inputs, int(row), sliding_window) for row in np.flatnonzero((lengths > 0) & ~grouped)]
    groups: list[PagedGroup] = []
    for num_queries in np.unique(lengths[grouped]):
        rows = np.flatnonzero(grouped & (lengths == num_queries))
        first, end = _needed_blocks(inputs, rows, sliding_window)
        for members in _similar(end - first, block_bytes):
            groups.append(_paged_group(inputs, rows[members], first[members], end[members], sliding_window))
    return groups, chunks


def _needed_blocks(
    inputs: AttentionInputs, rows: Int64Array, sliding_window: int | None
) -> tuple[Int64Array, Int64Array]:
    """The columns `[first, end)` of the block table that the rows' queries see."""
    end = -(-inputs.seq_lens[rows].astype(np.int64) // inputs.block_size)
    if sliding_window is None:
        return np.zeros_like(end), end
    first_position = inputs.num_computed_tokens[rows].astype(np.int64) - sliding_window + 1
    return np.maximum(first_position, 0) // inputs.block_size, end


def _similar(num_blocks: Int64Array, block_bytes: int) -> Iterator[Int64Array]:
    """Partition the rows so that those of a group need about as many blocks, within `MAX_GROUP_BYTES`."""
    order = np.argsort(-num_blocks, kind="stable")
    descending = -num_blocks[order]
    start = 0
    while start < len(order):
        longest = -int(descending[start])
        most = max(1, MAX_GROUP_BYTES // (longest * block_bytes))
        stop = int(np.searchsorted(descending, -MIN_FILL * longest, side="right"))
        stop = min(stop, start + most)
        yield np.sort(order[start:stop])
        start = stop


def _paged_group(
    inputs: AttentionInputs, rows: Int64Array, first: Int64Array, end: Int64Array, sliding_window: int | None
) -> PagedGroup:
    columns = first[:, None] + np.arange(int((end - first).max()))  # [num_rows, num_blocks]
    # A padding column stands for positions behind the row's last, so no query sees it; its bytes are the row's own.
    block_ids = inputs.block_table[rows[:, None], np.where(columns < end[:, None], columns, first[:, None])]
    key_positions = (columns[:, :, None] * inputs.block_size + np.arange(inputs.block_size)).reshape(len(rows), -1)
    num_queries = int(inputs.seq_lens[rows[0]] - inputs.num_computed_tokens[rows[0]])
    queries = np.arange(num_queries)
    query_positions = inputs.num_computed_tokens[rows].astype(np.int64)[:, None] + queries
    return PagedGroup(
        tokens=inputs.query_start_loc[rows].astype(np.int64)[:, None] + queries,
        block_ids=block_ids.astype(np.int64),
        visible=_visible(query_positions[:, :, None], key_positions[:, None, :], sliding_window),
    )


def _visible(query_positions: Int64Array, key_positions: Int64Array, sliding_window: int | None) -> BoolArray:
    causal: BoolArray = key_positions <= query_positions
    if sliding_window is None:
        return causal
    return causal & (key_positions > query_positions - sliding_window)


def _chunk(inputs: AttentionInputs, row: int, sliding_window: int | None) -> Chunk:
    token_start, token_end = (int(loc) for loc in inputs.query_start_loc[row : row + 2])
    computed, seq_len = int(inputs.num_computed_tokens[row]), int(inputs.seq_lens[row])
    if computed == 0 and (sliding_window is None or sliding_window >= seq_len):
        whole = Piece(token_start, token_end, 0, seq_len, None)
        return Chunk(token_start, token_end, None, (whole,))
    block_ids, origin = None, 0  # origin: the position of the chunk's first key
    if computed > 0:
        first_block, end_block = _needed_blocks(inputs, np.array([row]), sliding_window)
        block_ids = inputs.block_table[row, int(first_block[0]) : int(end_block[0])].astype(np.int64)
        origin = int(first_block[0]) * inputs.block_size
    pieces = []
    for start in range(computed, seq_len, PIECE_TOKENS):
        end = min(start + PIECE_TOKENS, seq_len)
        key_start = origin if sliding_window is None else max(origin, start - sliding_window + 1)
        pieces.append(
            Piece(
                query_start=token_start + start - computed,
                query_end=token_start + end - computed,
                key_start=key_start - origin,
                key_end=end - origin,
                visible=_visible(np.arange(start, end)[:, None], np.arange(key_start, end), sliding_window),
            )
        )
    return Chunk(token_start, token_end, block_ids, tuple(pieces))
