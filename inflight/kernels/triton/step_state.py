"""Two small Triton kernels that change the GPU's state of the running requests: by entries of the host, and by drawn tokens."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512


@triton.jit(do_not_specialize=["first", "num_pairs", "num_entries"])
def _apply_entries_kernel(state, entries, first, num_pairs, num_entries, BLOCK: tl.constexpr):
    i = first + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_entry = i < num_entries
    destination = tl.load(entries + 2 * i, mask=is_entry, other=0)
    value = tl.load(entries + 2 * i + 1, mask=is_entry, other=0)
    copied = tl.load(state + value, mask=is_entry & (i >= num_pairs), other=0)
    tl.store(state + destination, tl.where(i < num_pairs, value, copied), mask=is_entry)


def apply_entries(state: Tensor, entries: Tensor, first: int, num_pairs: int, num_entries: int) -> None:
    """Apply the entries `[first, num_entries)` to `state`.

    Args:
        state: int32 [n].
        entries: int32 [m, 2], m >= num_entries. The first `num_pairs` entries are (destination, value) and set a number.
            The other entries are (destination, source) and copy a number. Destinations and sources are indices of `state`. All
            destinations are distinct, and none of them is a source.
    """
    if num_entries > first:
        grid = (triton.cdiv(num_entries - first, BLOCK),)
        _apply_entries_kernel[grid](state, entries, first, num_pairs, num_entries, BLOCK=BLOCK)


@triton.jit(do_not_specialize=["num_draws"])
def _advance_kernel(
    tokens,
    draw_slots,
    draw_positions,
    last_tokens,
    history,
    input_ids,
    positions,
    seq_lens,
    max_model_len,
    dummy_slot,
    num_draws,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_draw = i < num_draws
    slot = tl.load(draw_slots + i, mask=is_draw, other=0)
    position = tl.load(draw_positions + i, mask=is_draw, other=0)
    token = tl.maximum(tl.load(tokens + i, mask=is_draw, other=0), 0)
    is_draw = is_draw & (slot != dummy_slot)
    tl.store(last_tokens + slot, token, mask=is_draw)
    place = slot.to(tl.int64) * max_model_len + position
    tl.store(history + place, token, mask=is_draw & (position < max_model_len))
    tl.store(draw_positions + i, position + 1, mask=is_draw)
    tl.store(input_ids + i, token, mask=is_draw)
    tl.store(positions + i, position, mask=is_draw)
    tl.store(seq_lens + i, position + 1, mask=is_draw)


def advance(
    tokens: Tensor,
    draw_slots: Tensor,
    draw_positions: Tensor,
    *,
    last_tokens: Tensor,
    history: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
) -> None:
    """Advance the state of the running requests. Each request has a slot (an index). Token i was drawn for the request
    in slot `draw_slots[i]`, and has position `draw_positions[i]` in its sequence.

    The token becomes the slot's last token and a part of its history. It also becomes row i of the next step's inputs, in case
    row i of the next step has the same slot.

    All tensors are int32: tokens, draw_slots, draw_positions [n]; last_tokens [num_slots + 1]; history [num_slots + 1,
    max_model_len]; input_ids, positions, seq_lens at least [n]. The last slot belongs to no request and does not change. If no
    token could be drawn, the token is -1, and here it is replaced by 0. The request fails when the host reads the -1, but steps
    that were launched before may still compute this token.
    """
    num_draws = len(tokens)
    _advance_kernel[(triton.cdiv(num_draws, BLOCK),)](
        tokens,
        draw_slots,
        draw_positions,
        last_tokens,
        history,
        input_ids,
        positions,
        seq_lens,
        history.shape[1],
        len(last_tokens) - 1,
        num_draws,
        BLOCK=BLOCK,
    )
