"""Paged attention in plain torch. It is used if the C++ kernels are not built or do not support the model's shapes.

For each row (a request's part of a step) it gathers the blocks that the row's tokens see. Then it calls
`scaled_dot_product_attention`.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from inflight.attention.backend import AttentionBackend, AttentionParams, LayerCache, copied
from inflight.attention.image_ends import ends_of_step
from inflight.attention.metadata import AttentionInputs, AttentionMetadata
from inflight.attention.torch_cap_and_sinks import attend_with_cap_and_sinks
from inflight.interface.kv_cache import KVCacheSpec
from inflight.interface.request import Int32Array

# The queries of a row are computed in pieces of this many tokens. So masks are small, and a piece does not read the keys after
# its last token.
PIECE_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Row:
    """One request's part of a step: the tokens at the positions `[num_computed, seq_len)` of its sequence."""

    first_token: int  # the index of the first of these tokens in the flat batch
    num_computed: int
    seq_len: int
    first_key: int  # the position, in the sequence, of the first key in the first block of `block_ids`
    block_ids: torch.Tensor  # [num_blocks], the blocks that the row's queries see


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchSdpaMetadata(AttentionMetadata):
    # the place of each token of the step: (block ids, offsets in the block), each [num_tokens]
    written: tuple[torch.Tensor, torch.Tensor]
    rows: tuple[Row, ...]
    inputs: AttentionInputs
    ends: Int32Array | None = None  # see `ends_of_step`

    def with_ends(self, first_token: int, ends: torch.Tensor) -> "TorchSdpaMetadata":
        return replace(self, ends=ends_of_step(self.inputs, self.ends, first_token, ends.numpy()))


class TorchSdpaBackend(AttentionBackend):
    """The backend in plain torch, for tensors on the CPU. It has no state."""

    def build_metadata(self, inputs: AttentionInputs, spec: KVCacheSpec) -> TorchSdpaMetadata:
        size = spec.block_size
        table = inputs.block_table.astype(np.int64)
        lengths = np.diff(inputs.query_start_loc)
        rows = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(len(rows)) + (inputs.num_computed_tokens - inputs.query_start_loc[:-1])[rows]
        return TorchSdpaMetadata(
            num_tokens=len(rows),
            inputs=copied(inputs),
            written=(torch.from_numpy(table[rows, positions // size]), torch.from_numpy(positions % size)),
            rows=tuple(
                _row(block_ids, first_token, num_computed, seq_len, spec)
                for block_ids, first_token, num_computed, seq_len in zip(
                    table,
                    inputs.query_start_loc[:-1].tolist(),
                    inputs.num_computed_tokens.tolist(),
                    inputs.seq_lens.tolist(),
                    strict=True,
                )
            ),
        )

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        kv_cache, metadata, params = cache
        assert isinstance(metadata, TorchSdpaMetadata), f"metadata of another backend: {type(metadata).__name__}"
        assert len(query) == metadata.num_tokens, f"{len(query)} query tokens, {metadata.num_tokens} in the metadata"
        if key.shape[1]:
            slots = kv_cache.permute(0, 3, 1, 2, 4)  # [num_blocks, block_size, 2 (or 1), num_kv_heads, head_dim]
            slots[metadata.written] = torch.stack((key, value) if params.value_dim is None else (key,), dim=1)
        output = query.new_empty((*query.shape[:2], params.value_dim or query.shape[2]))
        ends = None
        if params.sees_whole_images and metadata.ends is not None:
            ends = torch.from_numpy(metadata.ends)  # of each token
        for row in metadata.rows:
            window = params.sliding_window or row.seq_len
            # [2 (or 1), num_kv_heads, num_keys, head_dim]
            gathered = kv_cache[row.block_ids].permute(1, 2, 0, 3, 4).flatten(2, 3)
            for start in range(row.num_computed, row.seq_len, PIECE_TOKENS):
                end = min(start + PIECE_TOKENS, row.seq_len)
                tokens = slice(row.first_token + start - row.num_computed, row.first_token + end - row.num_computed)
                first = max(row.first_key, start - window + 1)
                end_key = end if params.is_causal else min(row.seq_len, end + window - 1)
                if ends is not None:
                    end_key = int(ends[tokens][-1])  # they do not fall
                keys, values = gathered[[0, -1], :, first - row.first_key : end_key - row.first_key]
                values = values[..., : params.value_dim]
                positions = torch.arange(first, end_key, dtype=torch.int64, device="cpu")
                distances = torch.arange(start, end, dtype=torch.int64, device="cpu")[:, None] - positions
                visible = distances < window
                if ends is not None:
                    visible &= positions < ends[tokens, None]
                else:
                    visible &= distances > (-1 if params.is_causal else -window)
                output[tokens] = _attend(query[tokens], keys, values, visible, distances, params)
        return output


def _row(block_ids: np.ndarray, first_token: int, num_computed: int, seq_len: int, spec: KVCacheSpec) -> Row:
    """`block_ids`: the row of this request in the block table."""
    first_block = 0
    if spec.sliding_window is not None:
        first_block = max(0, num_computed - spec.sliding_window + 1) // spec.block_size
    seen = block_ids[first_block : -(-seq_len // spec.block_size)]
    return Row(first_token, num_computed, seq_len, first_block * spec.block_size, torch.from_numpy(seen))


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    distances: torch.Tensor,
    params: AttentionParams,
) -> torch.Tensor:
    """query [num_queries, num_heads, head_dim]; keys, values [num_kv_heads, num_keys, head_dim] -> a tensor in query's shape.

    Several query heads share a key head. `expand` gives each of them a view of the key head, so the key head is not copied.
    """
    num_kv_heads = len(keys)
    per_head = query.shape[1] // len(keys)
    heads = query.reshape(len(query), num_kv_heads, per_head, -1).permute(1, 2, 0, 3)
    keys, values = (x[:, None].expand(-1, per_head, -1, -1) for x in (keys, values))
    # `heads` is [num_kv_heads, per_head, num_queries, head_dim]
    if params.soft_cap is None and params.sinks is None and params.position_bias is None:
        found = F.scaled_dot_product_attention(heads, keys, values, attn_mask=visible, scale=params.scale)
    else:
        found = attend_with_cap_and_sinks(heads, keys, values, visible, distances, params)
    return found.permute(2, 0, 1, 3).flatten(1, 2)
