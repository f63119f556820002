"""`StateMetadata.pieces`: where a step's rows are cut for recurrent layers, and where their states are."""

from __future__ import annotations

import numpy as np
import pytest

from inflight.attention.metadata import AttentionInputs, StateMetadata, StatePiece, StatePlace

BLOCK_SIZE = 4


def pieces(start: int, count: int, *, num_states: int) -> list[StatePiece]:
    """Of one row with `count` tokens behind `start` others. Its blocks are 7 and 8, and the dummy block."""
    inputs = AttentionInputs(
        query_start_loc=np.array([0, count], dtype=np.int32),
        seq_lens=np.array([start + count], dtype=np.int32),
        num_computed_tokens=np.array([start], dtype=np.int32),
        block_table=np.array([[7, 8, 0]], dtype=np.int32),
    )
    metadata = StateMetadata(num_tokens=count, inputs=inputs, block_size=BLOCK_SIZE, num_states=num_states)
    return list(metadata.pieces())


@pytest.mark.parametrize("count", [2, 3])
def test_every_token_keeps_its_state_if_the_block_has_room_for_all(count: int) -> None:
    """They may be drafts: only the next step knows after which of them the sequence goes on."""
    places = [StatePlace(7, 1), StatePlace(7, 2), StatePlace(7, 0), StatePlace(8, 1)]  # after 2, 3, 4 and 5 tokens
    wanted = [StatePiece(slice(i, i + 1), places[i], places[i + 1]) for i in range(count)]
    assert pieces(2, count, num_states=3) == wanted


def test_a_longer_row_keeps_the_states_at_the_ends_of_blocks_and_its_last_one() -> None:
    first = StatePiece(slice(0, 2), StatePlace(7, 1), StatePlace(7, 0))
    assert pieces(2, 4, num_states=3) == [first, StatePiece(slice(2, 4), StatePlace(7, 0), StatePlace(8, 2))]


def test_the_first_tokens_have_no_state_before_them() -> None:
    assert pieces(0, 3, num_states=1) == [StatePiece(slice(0, 3), None, StatePlace(7, 0))]
