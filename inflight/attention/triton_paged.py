"""Paged attention on a GPU, by Triton kernels that read the KV blocks in place. CUDA graphs can record these kernels.

The cache has the model's dtype or float8_e4m3fn. The host computes the sizes of the kernels' grids from upper bounds in the
metadata. The kernels read all other inputs from device memory. So a recorded graph can be used for other batches within the
same bounds.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from inflight.attention.backend import AttentionBackend, HeadNorm, LayerCache, Rotation
from inflight.attention.metadata import AttentionInputs, AttentionMetadata
from inflight.interface.kv_cache import KVCacheSpec
from inflight.kernels.triton.attention_decode import DecodeScratch, attention_decode, num_splits
from inflight.kernels.triton.attention_mixed import LEAST_SHARED_BYTES, attention_mixed
from inflight.kernels.triton.rotary_kv import rotary_kv


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonPagedMetadata(AttentionMetadata):
    """`num_rows`, `max_query_len` and `max_seq_len` are upper bounds. The tensors are on the device. `num_tokens` is the size
    of the flat batch with padding.

    A slot is a row of `block_table`. A padding row has no query tokens (two equal values in `query_start_loc`), or it belongs
    to a dummy slot, which no request has, and whose blocks are all the dummy block. A row's query tokens are the last tokens of
    its sequence, which has `seq_lens` tokens.
    """

    num_rows: int
    max_query_len: int  # if 1, every row has exactly one query token: token i belongs to row i
    has_single_tokens: bool  # some rows may have exactly one query token
    max_seq_len: int
    query_start_loc: Tensor  # int32 [num_rows + 1]
    seq_lens: Tensor  # int32 [num_rows], how many tokens are in the cache after this step
    slots: Tensor  # int32 [num_rows]
    token_slots: Tensor  # int32 [num_tokens], the slot of each token's row
    positions: Tensor  # int32 [num_tokens]
    block_table: Tensor  # int32 [num_slots, max_blocks]

    image_ends: Tensor | None = None  # int32 [num_tokens], see `with_ends`

    def with_ends(self, first_token: int, ends: Tensor) -> "TritonPagedMetadata":
        found = self.positions + 1 if self.image_ends is None else self.image_ends.clone()
        found[first_token : first_token + len(ends)] = ends
        return replace(self, image_ends=found)


class TritonPagedBackend(AttentionBackend):
    """Owns the scratch memory of the decode kernel, which is a few megabytes for any batch size.

    The first decode step allocates this memory, so no graph may record this step. The memory never moves, because graphs record
    its address.

    Args:
        max_shared_bytes: the most shared memory that one program (thread block) can use on the device.
    """

    def __init__(
        self, device: torch.device, *, num_multiprocessors: int, max_shared_bytes: int = LEAST_SHARED_BYTES
    ) -> None:
        self._device = device
        self._num_multiprocessors = num_multiprocessors
        self._max_shared_bytes = max_shared_bytes
        self._scratch: dict[tuple[int, int], DecodeScratch] = {}  # by query heads per key head, and head_dim

    def scratch_bytes(self, spec: KVCacheSpec, *, per_head: int, num_threads: int) -> int:
        return DecodeScratch.num_bytes(self._num_multiprocessors, per_head, spec.head_dim)

    def build_metadata(self, inputs: AttentionInputs, spec: KVCacheSpec) -> TritonPagedMetadata:
        """Builds the metadata of a step that no graph records. In such a step, row i has slot i."""
        lengths = np.diff(inputs.query_start_loc)
        rows = np.arange(len(lengths), dtype=np.int32)
        token_slots = np.repeat(rows, lengths)
        first_positions = inputs.num_computed_tokens - inputs.query_start_loc[:-1]
        positions = np.arange(len(token_slots), dtype=np.int32) + first_positions[token_slots]
        return TritonPagedMetadata(
            num_tokens=len(token_slots),
            num_rows=len(lengths),
            max_query_len=1 if (lengths == 1).all() else max(2, int(lengths.max())),
            has_single_tokens=bool((lengths == 1).any()),
            max_seq_len=int(inputs.seq_lens.max()),
            query_start_loc=self._tensor(inputs.query_start_loc),
            seq_lens=self._tensor(inputs.seq_lens),
            slots=self._tensor(rows),
            token_slots=self._tensor(token_slots),
            positions=self._tensor(positions),
            block_table=self._tensor(inputs.block_table),
        )

    def _tensor(self, array: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> Tensor:
        copied = torch.from_numpy(np.array(array, dtype=np.int32))
        # `torch.tensor` cannot pin an array of numpy
        pinned = copied.pin_memory() if self._device.type == "cuda" else copied
        return pinned.to(self._device, non_blocking=True)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, cache: LayerCache) -> Tensor:
        return self.attend(torch.cat((query, key, value), dim=1), None, None, cache, num_heads=query.shape[1])

    def attend(
        self, heads: Tensor, rotation: Rotation | None, norm: HeadNorm | None, cache: LayerCache, *, num_heads: int
    ) -> Tensor:
        """See `AttentionBackend`. Without a `rotation`, queries and keys are not rotated."""
        kv_cache, metadata, params = cache
        assert isinstance(metadata, TritonPagedMetadata), f"metadata of another backend: {type(metadata).__name__}"
        assert len(heads) == metadata.num_tokens, f"{len(heads)} tokens, but {metadata.num_tokens} in the metadata"
        query = rotary_kv(
            heads,
            None if norm is None else norm.weight,
            0.0 if norm is None else norm.eps,
            None if rotation is None else (rotation.cos, rotation.sin),
            kv_cache,
            metadata.block_table,
            metadata.token_slots,
            metadata.positions,
            num_heads=num_heads,
        )
        if metadata.max_query_len == 1:
            return self._attend_single_tokens(query, cache)
        image_ends = metadata.image_ends if params.sees_whole_images else None
        # a single token that may also see keys behind itself stays with the prompts
        splits_single_tokens = params.is_causal and image_ends is None
        output = attention_mixed(
            *(query, kv_cache, metadata.block_table, metadata.slots, metadata.seq_lens, metadata.query_start_loc),
            scale=params.scale,
            sliding_window=params.sliding_window,
            soft_cap=params.soft_cap,
            sinks=params.sinks,
            is_causal=params.is_causal,
            image_ends=image_ends,
            least_queries=2 if splits_single_tokens else 1,
            max_shared_bytes=self._max_shared_bytes,
        )
        if splits_single_tokens and metadata.has_single_tokens:
            self._attend_single_tokens(query, cache, metadata.query_start_loc, output)
        return output

    def _attend_single_tokens(
        self, query: Tensor, cache: LayerCache, query_start_loc: Tensor | None = None, output: Tensor | None = None
    ) -> Tensor:
        """The attention of the rows with one token. With `query_start_loc`, other rows may have more tokens."""
        kv_cache, metadata, params = cache
        assert isinstance(metadata, TritonPagedMetadata)
        num_kv_heads, sliding_window = kv_cache.shape[2], params.sliding_window
        longest = metadata.max_seq_len if sliding_window is None else min(metadata.max_seq_len, sliding_window)
        return attention_decode(
            *(query, kv_cache, metadata.block_table, metadata.slots, metadata.seq_lens),
            self._decode_scratch(query, num_kv_heads),
            splits=num_splits(metadata.num_rows, num_kv_heads, longest, self._num_multiprocessors),
            scale=params.scale,
            sliding_window=sliding_window,
            soft_cap=params.soft_cap,
            sinks=params.sinks,
            query_start_loc=query_start_loc,
            output=output,
        )

    def _decode_scratch(self, query: Tensor, num_kv_heads: int) -> DecodeScratch:
        shape = query.shape[1] // num_kv_heads, query.shape[2]
        if shape not in self._scratch:
            self._scratch[shape] = DecodeScratch.allocate(self._num_multiprocessors, *shape, query.device)
        return self._scratch[shape]
