"""Paged attention on a CPU, by a C++ kernel that reads the KV blocks in place. So no block is copied and no mask is made.

In each block, a layer has one cell for each key head, then, if values are stored, one cell for each value head. The kernel
defines the layout within a cell (kernels/cpu/attention_cells.h). The cache has the model's dtype or int8. With int8, keys and
values are quantised when they are written, with one scale per token and head, and attention reads only the quantised keys and
values.
"""

import ctypes
from dataclasses import dataclass, replace

import torch

from inflight.attention.backend import AttentionBackend, AttentionParams, LayerCache, bytes_of_layer, copied
from inflight.attention.image_ends import ends_of_step
from inflight.attention.metadata import AttentionInputs, AttentionMetadata, StateMetadata
from inflight.interface.kv_cache import KVCacheSpec
from inflight.interface.request import Int32Array
from inflight.kernels.cpu.call_checks import require
from inflight.kernels.cpu.functions import DTYPES, AttentionStep, HeadLayout
from inflight.kernels.cpu.functions import AttentionParams as KernelParams
from inflight.kernels.cpu.head_values import require_of_heads
from inflight.kernels.cpu.limits import attention_problem, require_attention

CACHE_DTYPES = {**DTYPES, torch.int8: 2}  # the values of `DType` in kernels.h
SCALE_BYTES = 4  # of a head and a token in int8


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuPagedMetadata(AttentionMetadata):
    """`step` has pointers to the data of `inputs` and to `ends`, so this object keeps them."""

    step: AttentionStep
    inputs: AttentionInputs
    ends: Int32Array | None = None  # see `ends_of_step`

    def with_ends(self, first_token: int, ends: torch.Tensor) -> "CpuPagedMetadata":
        found = ends_of_step(self.inputs, self.ends, first_token, ends.numpy())
        step = AttentionStep.from_buffer_copy(self.step)
        step.ends = found.ctypes.data
        return replace(self, step=step, ends=found)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuStateMetadata(StateMetadata):
    """`step` has pointers to the data of `inputs`."""

    step: AttentionStep


class CpuPagedBackend(AttentionBackend):
    """The backend that uses the C++ kernel. This object has no state, but the kernel keeps scratch memory for each thread."""

    is_batch_invariant = True

    def __init__(self, kernels: ctypes.CDLL) -> None:
        self._kernels = kernels

    @staticmethod
    def supports(head_dim: int, block_size: int, dtype: torch.dtype, kv_cache_dtype: torch.dtype) -> bool:
        return attention_problem(head_dim, None, block_size, dtype, kv_cache_dtype) is None

    def kv_cache_view(self, arena: torch.Tensor, spec: KVCacheSpec, layer_index: int) -> torch.Tensor:
        """Returns `[num_blocks, number of cells, elements of a cell]`. The cells of keys come first. With int8, a cell
        includes the bytes of its scales.

        Raises:
            ConfigError: the kernel does not support the layer.
        """
        layer = bytes_of_layer(arena, spec, layer_index)
        dtype = torch.float32 if layer.dtype == torch.int8 else layer.dtype
        require_attention(spec.head_dim, None, spec.block_size, dtype, layer.dtype)
        require(
            layer[0].nbytes == spec.block_bytes, f"layer {layer_index} needs {spec.block_bytes} bytes of a block", arena
        )
        return layer.view(len(arena), spec.num_cells * spec.num_kv_heads, -1)

    def scratch_bytes(self, spec: KVCacheSpec, *, per_head: int, num_threads: int) -> int:
        return int(self._kernels.inflight_attention_scratch_bytes(spec.head_dim, num_threads))

    @staticmethod
    def head_layout(
        kv_cache: torch.Tensor, num_heads: int, head_dim: int, value_dim: int | None, dtype: torch.dtype
    ) -> HeadLayout:
        """Makes the struct that describes a layer's heads and cache to the kernel."""
        block_stride = kv_cache.stride(0) * kv_cache.element_size()
        dtypes = DTYPES[dtype], CACHE_DTYPES[kv_cache.dtype]
        num_kv_heads = _num_kv_heads(kv_cache, value_dim)
        return HeadLayout(num_heads, num_kv_heads, head_dim, value_dim or head_dim, *dtypes, block_stride)

    @staticmethod
    def kernel_params(params: AttentionParams) -> KernelParams:
        """Makes the struct that describes `params` to the kernel. `params` must be kept, because the struct has a pointer."""
        bias = params.position_bias
        pointers = (None if each is None else each.data_ptr() for each in (params.sinks, bias))
        numbers = 0 if bias is None else bias.shape[1] // 2, params.is_causal, params.sees_whole_images
        return KernelParams(params.scale, params.soft_cap or 0.0, *pointers, *numbers)

    def build_metadata(self, inputs: AttentionInputs, spec: KVCacheSpec) -> CpuPagedMetadata:
        inputs = copied(inputs)
        return CpuPagedMetadata(
            num_tokens=int(inputs.query_start_loc[-1]), step=_step_struct(inputs, spec), inputs=inputs
        )

    def build_state_metadata(self, inputs: AttentionInputs, spec: KVCacheSpec) -> CpuStateMetadata:
        inputs = copied(inputs)
        return CpuStateMetadata(
            num_tokens=int(inputs.query_start_loc[-1]),
            inputs=inputs,
            block_size=spec.block_size,
            num_states=spec.num_states,
            step=_step_struct(inputs, spec),
        )

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        kv_cache, metadata, params = cache
        require(isinstance(metadata, CpuPagedMetadata), "attention needs metadata of its backend", type(metadata))
        assert isinstance(metadata, CpuPagedMetadata)  # for the type checker
        self._check_call(query, key, value, cache, metadata.step.block_size)
        num_tokens, num_heads, head_dim = query.shape
        num_new = key.shape[1]  # without new keys, the kernel writes nothing
        layout = self.head_layout(kv_cache, num_heads, head_dim, params.value_dim, query.dtype)
        output = torch.empty((num_tokens, num_heads, params.value_dim or head_dim), dtype=query.dtype, device="cpu")
        self._kernels.inflight_paged_attention(
            query.data_ptr(),
            query.stride(0),
            key.data_ptr() if num_new else None,
            key.stride(0),
            value.data_ptr() if value.shape[1] else None,
            value.stride(0),
            output.data_ptr(),
            kv_cache.data_ptr(),
            metadata.step,
            layout,
            self.kernel_params(params),
        )
        return output

    @staticmethod
    def _check_call(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, block_size: int
    ) -> None:
        """
        Raises:
            ConfigError: the kernel does not support the layer.
            AssertionError: the arguments do not fit together.
        """
        kv_cache, metadata, params = cache
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads = _num_kv_heads(kv_cache, params.value_dim)
        require_attention(head_dim, params.value_dim, block_size, query.dtype, kv_cache.dtype)
        bytes_of_head = head_dim + SCALE_BYTES if kv_cache.dtype == torch.int8 else head_dim
        num_new = key.shape[1]
        fit = (
            num_tokens == metadata.num_tokens
            and num_kv_heads > 0
            and num_heads % num_kv_heads == 0
            and num_new in (0, num_kv_heads)
            and (params.value_dim is not None or value.shape[1] == num_new)
            and kv_cache.shape[2] == block_size * bytes_of_head
            and kv_cache.stride(1) == kv_cache.shape[2]
            and all(
                rows.shape[0] == num_tokens
                and rows.shape[2] == head_dim
                and rows.dtype == query.dtype
                and rows.stride(2) == 1
                and (rows.shape[1] <= 1 or rows.stride(1) == head_dim)
                for rows in (query, key, value)
            )
        )
        needed = (
            f"attention needs queries, keys and values of {metadata.num_tokens} tokens, in one dtype, with heads side by side "
            f"that fit the cache, whose block_size is {block_size}"
        )
        require(fit, needed, query, key, value, kv_cache)
        if params.sinks is not None or params.position_bias is not None:
            require_of_heads(num_heads, params.sinks, params.position_bias)


def _num_kv_heads(kv_cache: torch.Tensor, value_dim: int | None) -> int:
    return kv_cache.shape[1] // (2 if value_dim is None else 1)


def _step_struct(inputs: AttentionInputs, spec: KVCacheSpec) -> AttentionStep:
    arrays = inputs.query_start_loc, inputs.seq_lens, inputs.num_computed_tokens, inputs.block_table
    num_rows, lengths = len(inputs.seq_lens), [len(array) for array in arrays]
    require(
        lengths == [num_rows + 1, *[num_rows] * 3], f"a step of {num_rows} rows needs arrays of this length", lengths
    )
    return AttentionStep(
        num_rows,
        spec.block_size,
        spec.sliding_window or 0,
        inputs.block_table.shape[1],
        *(array.__array_interface__["data"][0] for array in arrays),
        spec.state_bytes,
        spec.num_states,
    )
