from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.kernels.triton.step_state import BLOCK, advance, apply_entries
from tests.support.triton_aot import KernelCase, resources
from tests.support.triton_inputs import DEVICE


@settings(max_examples=10)
@given(
    num_pairs=st.integers(0, BLOCK + 5),
    num_copies=st.integers(0, 9),
    first=st.integers(0, 4),
    seed=st.integers(0, 2**31),
)
def test_entries_are_written_and_copied(num_pairs: int, num_copies: int, first: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    before = random.integers(-5, 1 << 30, 4096).astype(np.int32)
    state = torch.from_numpy(before).to(DEVICE)
    places = random.permutation(4096)[: num_pairs + 2 * num_copies]
    destinations, sources = places[: num_pairs + num_copies], places[num_pairs + num_copies :]
    values = np.concatenate([random.integers(-(2**31), 2**31, num_pairs), sources])
    entries = torch.from_numpy(np.stack([destinations, values], axis=1).astype(np.int32)).to(DEVICE)
    expected = before.copy()
    for i, (destination, value) in enumerate(entries.tolist()):
        if i >= first:
            expected[destination] = value if i < num_pairs else before[value]
    apply_entries(state, entries, first, num_pairs, len(entries))
    assert np.array_equal(state.cpu().numpy(), expected)


def test_a_draw_moves_its_row_on_and_leaves_the_dummy_slot() -> None:
    num_slots, max_model_len = 3, 6
    tokens = torch.tensor([7, -1, 9, 5], dtype=torch.int32, device=DEVICE)
    draw_slots = torch.tensor([2, 0, 3, 1], dtype=torch.int32, device=DEVICE)  # 3: the dummy slot
    draw_positions = torch.tensor([4, 6, 1, 2], dtype=torch.int32, device=DEVICE)  # 6: behind the end of the history
    last_tokens = torch.zeros(num_slots + 1, dtype=torch.int32, device=DEVICE)
    history = torch.full((num_slots + 1, max_model_len), -9, dtype=torch.int32, device=DEVICE)
    input_ids, positions, seq_lens = (
        torch.full((8,), value, dtype=torch.int32, device=DEVICE) for value in (-1, -2, -3)
    )
    advance(
        tokens,
        draw_slots,
        draw_positions,
        last_tokens=last_tokens,
        history=history,
        input_ids=input_ids,
        positions=positions,
        seq_lens=seq_lens,
    )
    assert last_tokens.tolist() == [0, 5, 7, 0]
    assert draw_positions.tolist() == [5, 7, 1, 3]
    assert input_ids.tolist() == [7, 0, -1, 5, -1, -1, -1, -1]
    assert positions.tolist() == [4, 6, -2, 2, -2, -2, -2, -2]
    assert seq_lens.tolist() == [5, 7, -3, 3, -3, -3, -3, -3]
    assert (history != -9).nonzero().tolist() == [[1, 2], [2, 4]]
    assert (int(history[1, 2]), int(history[2, 4])) == (5, 7)


def test_the_kernels_compile_for_gpus() -> None:
    cases = [
        KernelCase(
            kernel="inflight.kernels.triton.step_state:_apply_entries_kernel",
            signature={
                "state": "*i32",
                "entries": "*i32",
                "first": "i32",
                "num_pairs": "i32",
                "num_entries": "i32",
                "BLOCK": "constexpr",
            },
            constants={"BLOCK": BLOCK},
        ),
        KernelCase(
            kernel="inflight.kernels.triton.step_state:_advance_kernel",
            signature={
                **dict.fromkeys(("tokens", "draw_slots", "draw_positions", "last_tokens", "history"), "*i32"),
                **dict.fromkeys(("input_ids", "positions", "seq_lens"), "*i32"),
                **dict.fromkeys(("max_model_len", "dummy_slot", "num_draws"), "i32"),
                "BLOCK": "constexpr",
            },
            constants={"BLOCK": BLOCK},
        ),
    ]
    for found in resources(cases):
        assert found.stack_bytes == 0, found
