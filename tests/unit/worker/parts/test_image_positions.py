"""Positions with three rows, compared with those that transformers computes for Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel, Qwen3VLConfig, Qwen3VLModel

from inflight.interface.images import NO_PIXELS, ImageInput, ImagesPart
from inflight.worker.parts.image_positions import positions_of

PLACEHOLDER, MERGE = 151655, 2


def make_prompt(pieces: list[tuple[int, int, int]]) -> tuple[list[int], ImagesPart]:
    """`pieces`: tokens of text, and then rows and columns of an image (0: none)."""
    tokens: list[int] = []
    images = []
    for text, rows, columns in pieces:
        tokens += [1] * text
        if rows and columns:
            count = rows * columns
            grid = 1, rows * MERGE, columns * MERGE
            start = len(tokens)
            images.append(ImageInput(start=start, num_tokens=count, digest=bytes(32), pixels=NO_PIXELS, grid=grid))
            tokens += [PLACEHOLDER] * count
    return tokens, ImagesPart(images=tuple(images), position_merge=MERGE)


@pytest.mark.parametrize("model", [Qwen2_5_VLModel, Qwen3VLModel])
def test_positions_are_those_of_transformers(model: type) -> None:
    config = Qwen2_5_VLConfig() if model is Qwen2_5_VLModel else Qwen3VLConfig()
    config.image_token_id = PLACEHOLDER
    reference = object.__new__(model)
    torch.nn.Module.__init__(reference)
    reference.config = config

    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4)), max_size=3), st.integers(1, 4))
    def check(pieces: list[tuple[int, int, int]], behind: int) -> None:
        # transformers takes neighbouring images as one
        pieces = [(max(text, 1), rows, columns) for text, rows, columns in pieces]
        tokens, part = make_prompt([*pieces, (behind, 0, 0)])
        ids = torch.tensor([tokens])
        types = (ids == PLACEHOLDER).int()
        grids = torch.tensor([image.grid for image in part.images]) if part.images else None
        wanted, delta = reference.get_rope_index(ids, mm_token_type_ids=types, image_grid_thw=grids)
        assert positions_of(part, 0, len(tokens)).tolist() == wanted[:, 0].tolist()
        assert part.rope_delta == int(delta)

    check()


@given(st.data())
def test_any_piece_of_a_prompt_has_the_positions_of_the_whole(data: st.DataObject) -> None:
    size = st.integers(0, 4)
    tokens, part = make_prompt([*data.draw(st.lists(st.tuples(size, size, size), max_size=4)), (3, 0, 0)])
    whole = positions_of(part, 0, len(tokens))
    start = data.draw(st.integers(0, len(tokens)))
    stop = data.draw(st.integers(start, len(tokens)))
    assert np.array_equal(positions_of(part, start, stop), whole[:, start:stop])


def test_without_rows_there_is_no_delta() -> None:
    _, part = make_prompt([(2, 3, 3)])
    assert part.rope_delta == 3 - 9
    assert ImagesPart(images=part.images).rope_delta == 0
