"""What the layers of a KV group need to know of a step: `AttentionInputs`, `AttentionMetadata`, `StateMetadata`."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import Tensor

from inflight.interface.kv_cache import DUMMY_BLOCK
from inflight.interface.request import Int32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionInputs:
    """The inputs of attention in one step, for one KV group (layers that share a block table). A row is one of the step's
    requests.

    Row i has the query tokens `[query_start_loc[i], query_start_loc[i + 1])` of the flat batch, at the positions
    `[num_computed_tokens[i], seq_lens[i])` of its sequence. Position p is in block `block_table[i, p // spec.block_size]`.
    If no query of the row can see a block, the block's entry in `block_table` may be stale. Such entries are never read.
    """

    query_start_loc: Int32Array  # [num_rows + 1]
    seq_lens: Int32Array  # [num_rows], how many tokens are in the cache after this step
    num_computed_tokens: Int32Array  # [num_rows], how many tokens are in the cache before this step
    block_table: Int32Array  # [num_rows, max_blocks]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """The data of a step that all attention layers of a KV group share. Each backend has its own subclass."""

    num_tokens: int

    def with_ends(self, first_token: int, ends: Tensor) -> "AttentionMetadata":
        """The same step, in which the token `first_token + i` sees the keys before position `ends[i]`, in layers that see whole
        images (`AttentionParams`). `ends`: int32, on the device. What is allowed: see `ends_of_step`. By default the group has
        no such layers here."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMetadata(AttentionMetadata):
    """The data of a step that the recurrent layers of a KV group share."""

    inputs: AttentionInputs
    block_size: int
    num_states: int

    def pieces(self) -> "Iterator[StatePiece]":
        """The pieces of the step's rows, in order. A row is cut after each block that keeps a state, and after each token if a
        block has room for the states after all tokens of the row: they may be drafts."""
        inputs, size = self.inputs, self.block_size

        for row, table in enumerate(inputs.block_table):
            first, position, end = (
                int(array[row]) for array in (inputs.query_start_loc, inputs.num_computed_tokens, inputs.seq_lens)
            )
            places = partial(_state_place, table, size, self.num_states)
            source = places(position) if position else None
            start = position
            keeps_each = 1 < end - position <= self.num_states
            while position < end:
                position = position + 1 if keeps_each else min(end, (position // size + 1) * size)
                target = places(position)
                if position == end or keeps_each or target.block != DUMMY_BLOCK:
                    yield StatePiece(slice(first, first + position - start), source, target)
                    first, start, source = first + position - start, position, target


def _state_place(table: Int32Array, block_size: int, num_states: int, num_tokens: int) -> "StatePlace":
    """Where the state after the tokens [0, num_tokens) of a row is."""
    last = num_tokens - 1
    return StatePlace(int(table[last // block_size]), last % num_states)


class StatePlace(NamedTuple):
    """Where a state is: its block, and its number in the block."""

    block: int
    number: int


class StatePiece(NamedTuple):
    """Tokens of one sequence in the flat batch. The state before them is at `source` (None: they are the first ones), and the
    state after them goes to `target`."""

    tokens: slice
    source: StatePlace | None
    target: StatePlace
