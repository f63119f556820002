"""`DeviceState`: the inputs of a step on a GPU, at addresses that never change, so that CUDA graphs can read them.

A slot is the place in the batch that one request keeps while it runs. A row is a request's part of a step. The state is one
int32 tensor, so that one kernel can write all changes that a plan (the scheduler's output) makes. The kernel is in
kernels/triton/step_state.py. The parts of the tensor:

    of the step, one element per token   input_ids, positions, token_slots
    of the step, one element per row     query_start_loc, seq_lens, slots
    of the step, one element per draw    logits_indices, draw_slots, draw_positions
    of the slots                         last_tokens (drawn), columns (sampling parameters), block_tables, rope_deltas,
                                         history (the tokens of each slot; only penalties and bad words read it)

Slot `max_num_seqs` is the dummy slot, which no request has. The padding of a step belongs to the dummy slot. The block table of
this slot has only the dummy block, a KV block that no request has. The state is written only on the stream `compute`, in step
order.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.config.architecture import ModelArchitecture
from inflight.config.device_options import check_device_state
from inflight.interface.kv_cache import KVCacheSpec, count_groups

ALIGNMENT = 64  # elements; each part starts at a multiple of it, so that kernels can use wide loads


def num_cache_groups(architecture: ModelArchitecture) -> int:
    """The number of KV cache groups that `initialize` will get. It depends only on the layers' heads and sliding windows."""
    specs = (
        KVCacheSpec(
            block_size=1,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            dtype="",
            itemsize=1,
            sliding_window=layer.window,
        )
        for layer in architecture.caching
    )
    return sum(count_groups(specs).values())


@dataclass(frozen=True, kw_only=True)
class StateSizes:
    """The sizes that determine the shapes of all parts. `max_num_tokens`: the most tokens of a step, padding included."""

    max_num_tokens: int
    max_num_seqs: int
    max_model_len: int
    max_blocks: int
    num_groups: int
    num_columns: int

    @property
    def max_num_rows(self) -> int:
        """The most rows of a step: one for each request, and one for padding."""
        return self.max_num_seqs + 1

    @property
    def dummy_slot(self) -> int:
        return self.max_num_seqs

    def parts(self) -> dict[str, tuple[int, ...]]:
        """The shape of each part, by name, in the order of the parts in memory."""
        num_slots = self.max_num_seqs + 1
        tokens = (self.max_num_tokens,)
        rows = (self.max_num_rows,)
        return {
            **dict.fromkeys(("input_ids", "positions", "token_slots"), tokens),
            "query_start_loc": (self.max_num_rows + 1,),
            **dict.fromkeys(("seq_lens", "slots", "logits_indices", "draw_slots", "draw_positions"), rows),
            "last_tokens": (num_slots,),
            "rope_deltas": (num_slots,),
            "columns": (self.num_columns, num_slots),
            "block_tables": (self.num_groups, num_slots, self.max_blocks),
            "history": (num_slots, self.max_model_len),
        }


class DeviceState:
    """
    Raises:
        ConfigError: the state would have more elements than a 32-bit index can address.

    Attributes:
        flat: the whole state, int32 [n].
        start: the index in `flat` where each part starts, by name.
    """

    def __init__(self, sizes: StateSizes, device: torch.device) -> None:
        self.sizes = sizes
        self.start: dict[str, int] = {}
        total = 0
        for name, shape in sizes.parts().items():
            self.start[name] = total
            total += -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT
        # The configuration was checked with an estimate, which counts the block tables of only one KV cache group.
        check_device_state(total, max_num_seqs=sizes.max_num_seqs, max_model_len=sizes.max_model_len)
        self.flat = torch.zeros(total, dtype=torch.int32, device=device)

    def part(self, name: str) -> Tensor:
        """A view of one part, in its shape."""
        shape = self.sizes.parts()[name]
        start = self.start[name]
        return self.flat[start : start + math.prod(shape)].view(shape)
