"""What a step tells attention, and what a backend makes of it."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.interface.request import Int32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionInputs:
    """One KV group's view of a step; rows are the step's requests.

    Row i has the query tokens `[query_start_loc[i], query_start_loc[i + 1])` of the flat batch, at the positions
    `[num_computed_tokens[i], seq_lens[i])` of its sequence; position p lies in block `block_table[i, p // block_size]`.
    Entries of `block_table` that no query of the row can see may be stale: they are never read.
    """

    query_start_loc: Int32Array  # [num_rows + 1]
    seq_lens: Int32Array  # [num_rows], the tokens of this step included
    num_computed_tokens: Int32Array  # [num_rows], tokens in the cache before this step
    block_table: Int32Array  # [num_rows, max_blocks]
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """Whatever of a step does not depend on the layer. A backend's own subclass says what it needs."""

    num_tokens: int
