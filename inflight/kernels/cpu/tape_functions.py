"""`TAPED`: the kernels that a tape may call, and what a recorder must know of each."""

from typing import NamedTuple


class Taped(NamedTuple):
    """What a recorder must know of a function: the indices of two arguments."""

    rows: int | None  # the number of rows, or a multiple of it
    out: int | None  # the pointer to the result; None: the function changes its input


TAPED = {  # the functions that a tape may call, in the order of `kFunctions` in tape.cpp
    "inflight_rms_norm": Taped(rows=6, out=5),
    "inflight_norm_and_rotate": Taped(rows=6, out=None),
    "inflight_linear": Taped(rows=6, out=3),
    "inflight_paged_attention": Taped(rows=None, out=6),
    "inflight_select_rows": Taped(rows=4, out=3),
    "inflight_all_reduce": Taped(rows=2, out=None),
    "inflight_all_gather": Taped(rows=3, out=2),
    "inflight_gated_delta": Taped(rows=None, out=2),
    "inflight_multiply_activation": Taped(rows=4, out=None),
    "inflight_add_and_scale": Taped(rows=6, out=None),
    "inflight_short_conv": Taped(rows=None, out=2),
    "inflight_linear_of_heads": Taped(rows=7, out=3),
    "inflight_copy_heads": Taped(rows=6, out=3),
    "inflight_choose_experts": Taped(rows=3, out=2),
    "inflight_experts": Taped(rows=4, out=3),
    "inflight_add_experts": Taped(rows=2, out=1),
    "inflight_layer_norm": Taped(rows=7, out=6),
    "inflight_activate": Taped(rows=2, out=None),
    "inflight_exchange_experts": Taped(rows=4, out=3),
}
