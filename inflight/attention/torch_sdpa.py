"""Paged attention in plain torch, for any device that torch runs on: gather, then `scaled_dot_product_attention`.

Layout of a layer's block: keys, then values, heads outermost, so that a gathered head is contiguous:

    kv_cache [num_blocks, 2, num_kv_heads, block_size, head_dim]

The cell of one (block, key or value, head) is `block_size * head_dim` contiguous elements. A gather copies whole cells
to `[2, num_rows, num_kv_heads, num_blocks * block_size, head_dim]`, in parts that stay in the processor's cache.
The forward that writes a block's first token also zeroes the slots behind the row's last token: they are read, and masked.
Grouped-query heads are never expanded: in a group of rows they are further queries of their key head, in a chunk the
keys are repeated by a stride of 0. Both reach the flash kernel on CPU (a test looks).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from inflight.attention import sdpa_plan
from inflight.attention.backend import AttentionBackend
from inflight.attention.metadata import AttentionInputs, AttentionMetadata
from inflight.device.base import TORCH_DTYPES
from inflight.interface.kv_cache import KVCacheSpec


@dataclass(slots=True)
class PagedBlocks:
    """Blocks to gather. The cells' indices need the arena's strides: the first layer's forward computes them."""

    ids: torch.Tensor  # [num_rows, num_blocks]
    cells: torch.Tensor | None = None  # [2 * num_rows * num_kv_heads * num_blocks]


@dataclass(frozen=True, slots=True)
class PagedGroup:
    tokens: torch.Tensor  # [num_rows * num_queries]
    blocks: PagedBlocks
    mask: torch.Tensor  # [num_rows, 1, num_queries * num_heads / num_kv_heads or 1, num_keys], 0 or -inf


@dataclass(frozen=True, slots=True)
class Piece:
    query_start: int
    query_end: int
    key_start: int
    key_end: int
    mask: torch.Tensor | None  # [num_queries, num_keys], 0 or -inf; None: causal


@dataclass(frozen=True, slots=True)
class Chunk:
    token_start: int
    token_end: int
    blocks: PagedBlocks | None
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchSdpaMetadata(AttentionMetadata):
    """`sdpa_plan`'s plan, on the device."""

    write: tuple[torch.Tensor, torch.Tensor]  # (block ids, offsets), each [num_tokens]
    clear: tuple[torch.Tensor, torch.Tensor] | None
    groups: tuple[PagedGroup, ...]
    chunks: tuple[Chunk, ...]


class TorchSdpaBackend(AttentionBackend):
    """State: one workspace for gathered keys and values, which grows to the largest gather so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._workspace = torch.empty(0, dtype=torch.uint8, device=device)

    def kv_cache_view(self, arena: torch.Tensor, spec: KVCacheSpec, layer_index: int) -> torch.Tensor:
        start = layer_index * spec.block_bytes
        layer = arena[:, start : start + spec.block_bytes].view(TORCH_DTYPES[spec.dtype])
        return layer.view(len(arena), 2, spec.num_kv_heads, spec.block_size, spec.head_dim)

    def build_metadata(self, inputs: AttentionInputs, spec: KVCacheSpec) -> TorchSdpaMetadata:
        written, cleared = sdpa_plan.slots_to_write(inputs)
        dtype = TORCH_DTYPES[spec.dtype]
        groups, chunks = sdpa_plan.plan(inputs, spec.sliding_window, block_bytes=spec.block_bytes)
        return TorchSdpaMetadata(
            num_tokens=int(inputs.query_start_loc[-1]),
            write=(self._tensor(written.block_ids), self._tensor(written.offsets)),
            clear=(self._tensor(cleared.block_ids), self._tensor(cleared.offsets)) if cleared.offsets.size else None,
            groups=tuple(self._group(group, dtype) for group in groups),
            chunks=tuple(self._chunk(chunk, dtype) for chunk in chunks),
        )

    def _group(self, group: sdpa_plan.PagedGroup, dtype: torch.dtype) -> PagedGroup:
        return PagedGroup(
            tokens=self._tensor(group.tokens.reshape(-1)),
            blocks=PagedBlocks(self._tensor(group.block_ids)),
            mask=self._mask(group.visible, dtype)[:, None],
        )

    def _chunk(self, chunk: sdpa_plan.Chunk, dtype: torch.dtype) -> Chunk:
        pieces = []
        for piece in chunk.pieces:
            mask = None if piece.visible is None else self._mask(piece.visible, dtype)
            pieces.append(Piece(piece.query_start, piece.query_end, piece.key_start, piece.key_end, mask))
        blocks = None if chunk.block_ids is None else PagedBlocks(self._tensor(chunk.block_ids[None]))
        return Chunk(chunk.token_start, chunk.token_end, blocks, tuple(pieces))

    def _tensor(self, array: sdpa_plan.Int64Array) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)

    def _mask(self, visible: sdpa_plan.BoolArray, dtype: torch.dtype) -> torch.Tensor:
        hidden = torch.from_numpy(~visible).to(self._device, non_blocking=True)
        return torch.zeros(hidden.shape, dtype=dtype, device=self._device).masked_fill_(hidden, -math.inf)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        assert isinstance(metadata, TorchSdpaMetadata), f"metadata of another backend: {type(metadata).__name__}"
        assert len(query) == metadata.num_tokens, f"{len(query)} queries, {metadata.num_tokens} in the metadata"
        slots = kv_cache.permute(0, 3, 1, 2, 4)  # [num_blocks, block_size, 2, num_kv_heads, head_dim]
        if metadata.clear is not None:
            slots[metadata.clear] = 0
        slots[metadata.write] = torch.stack((key, value), dim=1)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for group in metadata.groups:
            self._attend_group(query, kv_cache, group, scale, output)
        for chunk in metadata.chunks:
            if chunk.blocks is None:
                tokens = slice(chunk.token_start, chunk.token_end)
                keys, values = key[tokens].transpose(0, 1), value[tokens].transpose(0, 1)
            else:
                keys, values = (part[0] for part in self._gather(kv_cache, chunk.blocks))
            self._attend_chunk(query, keys, values, chunk, scale, output)
        return output

    def _attend_group(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        group: PagedGroup,
        scale: float,
        output: torch.Tensor,
    ) -> None:
        num_rows, _, num_queries, _ = group.mask.shape
        num_kv_heads, head_dim = kv_cache.shape[2], kv_cache.shape[4]
        per_head = query.shape[1] // num_kv_heads
        keys, values = self._gather(kv_cache, group.blocks)  # [num_rows, num_kv_heads, num_keys, head_dim]
        q = query.index_select(0, group.tokens).view(num_rows, num_queries, num_kv_heads, per_head, head_dim)
        q = q.permute(0, 2, 1, 3, 4).reshape(num_rows, num_kv_heads, num_queries * per_head, head_dim)
        mask = group.mask if num_queries == 1 else group.mask.repeat_interleave(per_head, dim=2)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
        out = out.view(num_rows, num_kv_heads, num_queries, per_head, head_dim).permute(0, 2, 1, 3, 4)
        output.index_copy_(0, group.tokens, out.reshape(num_rows * num_queries, -1, head_dim))

    def _attend_chunk(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        chunk: Chunk,
        scale: float,
        output: torch.Tensor,
    ) -> None:
        """`keys` and `values`: the chunk's, `[num_kv_heads, num_keys, head_dim]`."""
        num_kv_heads, _, head_dim = keys.shape
        per_head = query.shape[1] // num_kv_heads
        for piece in chunk.pieces:
            rows, seen = slice(piece.query_start, piece.query_end), slice(piece.key_start, piece.key_end)
            # [num_kv_heads, per_head, num_queries, head_dim]
            q = query[rows].view(-1, num_kv_heads, per_head, head_dim).permute(1, 2, 0, 3)
            out = output[rows].view(-1, num_kv_heads, per_head, head_dim).permute(1, 2, 0, 3)
            out.copy_(
                F.scaled_dot_product_attention(
                    q,
                    keys[:, None, seen].expand(-1, per_head, -1, -1),
                    values[:, None, seen].expand(-1, per_head, -1, -1),
                    attn_mask=piece.mask,
                    is_causal=piece.mask is None,
                    scale=scale,
                )
            )

    def _gather(self, kv_cache: torch.Tensor, blocks: PagedBlocks) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the blocks, in the workspace: each `[num_rows, num_kv_heads, num_keys, head_dim]`."""
        num_blocks, _, num_kv_heads, block_size, head_dim = kv_cache.shape
        num_rows, num_columns = blocks.ids.shape
        cell = block_size * head_dim
        step = math.gcd(cell, kv_cache.stride(0))  # cells start at multiples of it (padding may misalign blocks)
        if blocks.cells is None:
            heads = torch.arange(2 * num_kv_heads, device=self._device).view(2, 1, num_kv_heads, 1) * (cell // step)
            first = blocks.ids[None, :, None, :] * (kv_cache.stride(0) // step)
            blocks.cells = (first + heads).view(-1)  # [2, num_rows, num_kv_heads, num_columns]
        num_starts = ((num_blocks - 1) * kv_cache.stride(0) + (2 * num_kv_heads - 1) * cell) // step + 1
        cells = kv_cache.as_strided((num_starts, cell), (step, 1))
        gathered = self._space(len(blocks.cells) * cell, kv_cache.dtype)
        torch.index_select(cells, 0, blocks.cells, out=gathered.view(-1, cell))
        keys, values = gathered.view(2, num_rows, num_kv_heads, num_columns * block_size, head_dim)
        return keys, values

    def _space(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        num_bytes = num_elements * dtype.itemsize
        if self._workspace.numel() < num_bytes:
            self._workspace = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._workspace[:num_bytes].view(dtype)
