"""`FusedDecoder`: all decoder layers of a stage in one call of the C++ kernels.

It runs the same kernels as separate calls of the layers, so the results are equal bit for bit. It saves about 250 Python calls
per step. Such a call is slow, because the model's weights have pushed Python's data out of the processor's caches. During the
whole call the interpreter's lock is free for the engine's other threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.profiler import record_function

from inflight.attention.backend import AttentionMetadata, Rotation
from inflight.attention.cpu_paged import CpuPagedBackend, CpuPagedMetadata
from inflight.kernels.cpu.layer_ops import CpuLayerOps
from inflight.kernels.cpu.library import DTYPES, AttentionStep, DecoderLayer, DecoderStep, LinearWeight
from inflight.kernels.cpu.linear import PackedLinear
from inflight.layers.linear import Linear

if TYPE_CHECKING:
    from inflight.models.llama import LlamaDecoderLayer


class FusedDecoder:
    """Computes `layers`, which must be loaded and have equal shapes. Only one thread may call it."""

    def __init__(self, layers: Sequence[LlamaDecoderLayer]) -> None:
        self._layers = layers
        self._caches: tuple[Tensor | None, ...] = ()
        self._kernels = layers[0].input_layernorm.ops.kernels  # type: ignore[attr-defined]  # `can_fuse` has checked it

    @staticmethod
    def can_fuse(layers: Sequence[LlamaDecoderLayer]) -> bool:
        """Whether C++ kernels compute everything in the layers, and no other rank takes part in a layer."""
        return all(
            isinstance(layer.input_layernorm.ops, CpuLayerOps)
            and isinstance(layer.self_attn.attn.backend, CpuPagedBackend)
            and layer.mlp.down_proj.tp.size == 1
            and all(isinstance(part.multiply, PackedLinear) for part in layer.modules() if isinstance(part, Linear))
            for layer in layers
        )

    def __call__(
        self,
        delta: Tensor | None,
        residual: Tensor,
        rotation: Rotation,
        attn_metadata: tuple[AttentionMetadata, ...],
        rows: Tensor | None,
        num_layers: int | None,
    ) -> tuple[Tensor, Tensor]:
        """Computes the layers one after another. `residual` [num_tokens, hidden_size] is the residual stream. `delta` is the
        output of the layer before, which is not yet added to `residual` (None: there is none). Both are changed. Returns both
        as they are after the last layer. If `rows` is given, the results have only the tokens in `rows`."""
        layers = self._layers[:num_layers]
        attention, dtype = layers[0].self_attn, residual.dtype
        num_tokens, hidden_size = residual.shape
        num_heads, num_kv_heads, head_dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
        kv_cache = attention.attn.kv_cache
        assert kv_cache is not None, f"{attention.attn.layer_name} has no KV cache yet"
        assert residual.is_contiguous() and rotation.cos.is_contiguous() and rotation.sin.is_contiguous()
        left = torch.empty_like(residual) if delta is None else delta.contiguous()
        sizes = hidden_size, (num_heads + 2 * num_kv_heads) * head_dim, num_heads * head_dim, layers[0].mlp.size
        hidden, heads, attended, gated = (torch.empty(num_tokens, size, dtype=dtype) for size in sizes)
        if rows is not None:
            rows = rows.to(torch.int64).contiguous()
            assert len(rows) <= num_tokens, f"{len(rows)} rows of {num_tokens} tokens"
        groups = (ctypes.POINTER(AttentionStep) * len(attn_metadata))()
        # Only the KV groups that have layers on this stage.
        for group in {layer.self_attn.attn.group_index for layer in layers}:
            groups[group] = ctypes.pointer(_step_of(attn_metadata[group], num_tokens))
        step = DecoderStep(
            kv_groups=groups,
            num_tokens=num_tokens,
            rows=None if rows is None else rows.data_ptr(),
            num_rows=-1 if rows is None else len(rows),
            residual=residual.data_ptr(),
            delta=left.data_ptr(),
            has_delta=delta is not None,
            dtype=DTYPES[dtype],
            cos=rotation.cos.data_ptr(),
            sin=rotation.sin.data_ptr(),
            hidden=hidden.data_ptr(),
            heads=heads.data_ptr(),
            attended=attended.data_ptr(),
            gated=gated.data_ptr(),
            layout=CpuPagedBackend.head_layout(kv_cache, num_heads, head_dim, dtype),
            eps=layers[0].input_layernorm.eps,
            qk_eps=0.0 if attention.qk_norm is None else attention.qk_norm.eps,
        )
        with record_function("decoder_layers"):
            self._kernels.inflight_decoder_layers(self._describe(len(layers)), len(layers), step)
        num_rows = num_tokens if rows is None else len(rows)
        return left[:num_rows], residual[:num_rows]

    def _describe(self, num_layers: int) -> ctypes.Array[DecoderLayer]:
        """Describes the first `num_layers` layers to the kernels. The descriptions are made again when the layers are bound to
        another KV cache."""
        caches = tuple(layer.self_attn.attn.kv_cache for layer in self._layers[:num_layers])
        if len(caches) != len(self._caches) or any(a is not b for a, b in zip(caches, self._caches, strict=True)):
            self._described = (DecoderLayer * num_layers)(*(_describe(layer) for layer in self._layers[:num_layers]))
            self._caches = caches
        return self._described


def _step_of(metadata: AttentionMetadata, num_tokens: int) -> AttentionStep:
    assert isinstance(metadata, CpuPagedMetadata), f"metadata of another backend: {type(metadata).__name__}"
    assert num_tokens == metadata.num_tokens, f"{num_tokens} queries, {metadata.num_tokens} in the metadata"
    return metadata.step


def _weight_of(linear: Linear) -> ctypes._Pointer[LinearWeight]:
    assert isinstance(linear.multiply, PackedLinear)
    return ctypes.pointer(linear.multiply.weight)


def _describe(layer: LlamaDecoderLayer) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    assert attention.attn.kv_cache is not None
    return DecoderLayer(
        input_norm=layer.input_layernorm.weight.data_ptr(),
        qkv_proj=_weight_of(attention.qkv_proj),
        qk_norm=None if attention.qk_norm is None else attention.qk_norm.weight.data_ptr(),
        o_proj=_weight_of(attention.o_proj),
        post_attention_norm=layer.post_attention_layernorm.weight.data_ptr(),
        gate_up_proj=_weight_of(mlp.gate_up_proj),
        down_proj=_weight_of(mlp.down_proj),
        kv_cache=attention.attn.kv_cache.data_ptr(),
        attention=CpuPagedBackend.kernel_params(attention.attn.params),
        kv_group=attention.attn.group_index,
    )
