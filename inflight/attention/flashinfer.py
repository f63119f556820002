"""Paged attention by FlashInfer (arXiv:2501.01005), where it is installed: its paged prefill wrapper, for batches of any kind.

The cache has FlashInfer's layout "HND", which is the Triton backend's too: [num_blocks, 2, num_kv_heads, block_size, head_dim].
Its plan of a step is made on the host from host arrays, so that no graph can record it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inflight.attention import sdpa_plan
from inflight.attention.backend import AttentionBackend
from inflight.attention.metadata import AttentionInputs, AttentionMetadata
from inflight.device.base import TORCH_DTYPES
from inflight.errors import ConfigError
from inflight.interface.kv_cache import KVCacheSpec

WORKSPACE_BYTES = 128 << 20  # as its documentation recommends


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashInferMetadata(AttentionMetadata):
    """Arrays for `plan` are on the host, and the step's own."""

    spec: KVCacheSpec
    qo_indptr: Tensor  # int32 [num_rows + 1]
    paged_kv_indptr: Tensor  # int32 [num_rows + 1], of `paged_kv_indices`
    paged_kv_indices: Tensor  # int32, the rows' block ids one after another
    paged_kv_last_page_len: Tensor  # int32 [num_rows]
    write: tuple[Tensor, Tensor]  # (block ids, offsets) of the step's tokens, on the device


@dataclass(slots=True)
class _Planned:
    """A wrapper, and the step it is planned for."""

    wrapper: Any  # Any: FlashInfer has no types that the checks could read
    metadata: FlashInferMetadata | None = None
    copied: torch.cuda.Event | None = None  # behind the copies that the last plan queued


class FlashInferBackend(AttentionBackend):
    """State: a wrapper per kind of KV group, planned by the first layer of a step that uses it, and one workspace for all."""

    def __init__(self, device: torch.device) -> None:
        """Raises `ConfigError` if FlashInfer cannot be imported."""
        try:
            import flashinfer
        except ImportError as error:
            raise ConfigError(
                f"attention_backend='flashinfer': it cannot be imported ({error}); "
                "install it (pip install flashinfer-python), or use 'triton'"
            ) from error
        self._new_wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        self._device = device
        self._workspace: Tensor | None = None
        self._planned: dict[KVCacheSpec, _Planned] = {}

    def kv_cache_view(self, arena: Tensor, spec: KVCacheSpec, layer_index: int) -> Tensor:
        start = layer_index * spec.block_bytes
        layer = arena[:, start : start + spec.block_bytes].view(TORCH_DTYPES[spec.dtype])
        return layer.view(len(arena), 2, spec.num_kv_heads, spec.block_size, spec.head_dim)

    def build_metadata(self, inputs: AttentionInputs, spec: KVCacheSpec) -> FlashInferMetadata:
        num_blocks = -(-inputs.seq_lens // inputs.block_size)
        written, _ = sdpa_plan.slots_to_write(inputs)
        columns = np.arange(inputs.block_table.shape[1])
        return FlashInferMetadata(
            num_tokens=int(inputs.query_start_loc[-1]),
            spec=spec,
            qo_indptr=torch.tensor(inputs.query_start_loc, dtype=torch.int32),
            paged_kv_indptr=torch.tensor(np.concatenate(([0], np.cumsum(num_blocks))), dtype=torch.int32),
            paged_kv_indices=torch.tensor(inputs.block_table[columns < num_blocks[:, None]], dtype=torch.int32),
            paged_kv_last_page_len=torch.tensor(
                inputs.seq_lens - (num_blocks - 1) * inputs.block_size, dtype=torch.int32
            ),
            write=(
                torch.from_numpy(written.block_ids).to(self._device),
                torch.from_numpy(written.offsets).to(self._device),
            ),
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        assert isinstance(metadata, FlashInferMetadata), f"metadata of another backend: {type(metadata).__name__}"
        assert len(query) == metadata.num_tokens, f"{len(query)} queries, {metadata.num_tokens} in the metadata"
        slots = kv_cache.permute(0, 3, 1, 2, 4)  # [num_blocks, block_size, 2, num_kv_heads, head_dim]
        slots[metadata.write] = torch.stack((key, value), dim=1)
        planned = self._planned.get(metadata.spec)
        if planned is None or planned.metadata is not metadata:
            planned = self._plan(metadata, query, scale, sliding_window)
        output: Tensor = planned.wrapper.run(query.contiguous(), (kv_cache[:, 0], kv_cache[:, 1]))
        return output

    def _plan(self, metadata: FlashInferMetadata, query: Tensor, scale: float, sliding_window: int | None) -> _Planned:
        spec = metadata.spec
        planned = self._planned.get(spec)
        if planned is None:
            if self._workspace is None:
                self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
            planned = self._planned[spec] = _Planned(self._new_wrapper(self._workspace, "HND"))
        if planned.copied is not None:
            planned.copied.synchronize()  # a plan is staged in host memory that the next one overwrites
        planned.wrapper.plan(
            metadata.qo_indptr,
            metadata.paged_kv_indptr,
            metadata.paged_kv_indices,
            metadata.paged_kv_last_page_len,
            query.shape[1],
            spec.num_kv_heads,
            spec.head_dim,
            spec.block_size,
            causal=True,
            sm_scale=scale,
            window_left=-1 if sliding_window is None else sliding_window - 1,  # keys before the query's own
            q_data_type=query.dtype,
            kv_data_type=TORCH_DTYPES[spec.dtype],
        )
        if self._device.type == "cuda":
            planned.copied = torch.cuda.current_stream().record_event()
        planned.metadata = metadata
        return planned
