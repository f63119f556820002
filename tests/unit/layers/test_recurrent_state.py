"""Where the tensors of a state are in a block."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inflight.attention.metadata import StatePlace
from inflight.layers.recurrent_state import RecurrentState

BACKEND: Any = None  # Any: not asked


def state() -> RecurrentState:
    return RecurrentState(
        "model.layers.3.x", [(2, 9), (65,), (1,)], [torch.float32, torch.bfloat16, torch.float32], BACKEND
    )


def test_each_tensor_begins_at_a_cache_line() -> None:
    made = state()
    assert made.offsets == [0, 128, 320, 384]  # 72, 130 and 4 bytes
    for num_states in (1, 3):
        spec = made.kv_cache_spec(16, torch.int8, num_states)
        assert (spec.is_state, spec.block_size, spec.state_bytes, spec.num_states) == (True, 16, 384, num_states)
        assert spec.block_bytes == 384 * num_states


def test_the_tensors_of_a_place_are_views_of_its_bytes() -> None:
    made, cache = state(), torch.zeros(4, 3 * 384, dtype=torch.uint8)
    with pytest.raises(AssertionError, match=r"model\.layers\.3\.x has no cache yet"):
        made.tensors(StatePlace(0, 0))
    made.bind(cache, 5)
    assert made.group_index == 5
    for number, tensor in enumerate(made.tensors(StatePlace(2, 1))):
        tensor.fill_(number + 1)
    found = made.tensors(StatePlace(2, 1))
    assert [(each.dtype, tuple(each.shape)) for each in found] == [
        (torch.float32, (2, 9)),
        (torch.bfloat16, (65,)),
        (torch.float32, (1,)),
    ]
    assert [float(each.float().mean()) for each in found] == [1.0, 2.0, 3.0]
    written = cache[2, 384:768]
    assert int(cache.count_nonzero()) == int(written.count_nonzero())
    assert written[320:324].view(torch.float32).tolist() == [3.0]
    made.bind(None, 0)
    assert made.kv_cache is None
