"""An attention backend without a cache: all tokens of the step are one sequence, from position 0. For tests of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inflight.attention.backend import AttentionBackend, LayerCache
from inflight.attention.metadata import AttentionInputs, StateMetadata
from inflight.config.architecture import ModelArchitecture
from inflight.config.engine import ModelConfig, QuantizationConfig
from inflight.config.gguf_config import read_model_config
from inflight.config.parse_architecture import parse_architecture
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.model_loader.loader import load_model
from inflight.models.causal_lm import CausalLM, ModelStep


class FullContextAttention:
    """Attention in float64, written to be read."""

    is_batch_invariant = False
    attend = AttentionBackend.attend

    def forward(self, query: Tensor, key: Tensor, value: Tensor, cache: LayerCache) -> Tensor:
        kv_cache, _, params = cache
        num_tokens, num_heads, _ = query.shape
        if key.shape[1]:  # otherwise the cache is another layer's
            kv_cache[0], kv_cache[1] = key, value if params.value_dim is None else key
        keys, values = kv_cache.double().repeat_interleave(num_heads // kv_cache.shape[2], dim=2)
        scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * params.scale
        if params.soft_cap is not None:
            scores = params.soft_cap * torch.tanh(scores / params.soft_cap)
        age = torch.arange(num_tokens).unsqueeze(1) - torch.arange(num_tokens)  # [query, key]
        window = params.sliding_window or num_tokens
        visible = (age > (-1 if params.is_causal else -window)) & (age < window)
        scores = scores.masked_fill(~visible, -torch.inf)
        if params.sinks is not None:
            sinks = params.sinks.double()[:, None, None].expand(-1, num_tokens, 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(-1)[..., :num_tokens]
        return torch.einsum("hqk,khd->qhd", weights, values[..., : params.value_dim]).to(query.dtype).contiguous()


def load(
    folder: Path,
    quantization: QuantizationConfig | None = None,
    *,
    tp: TensorParallelGroup | None = None,
    batch_invariant: bool = False,
    architecture: ModelArchitecture | None = None,
    served: CausalLM | None = None,
) -> CausalLM:
    """The model of a folder in float32, built with `FullContextAttention`. `architecture`: instead of that of its config.json.
    `served`: as of `load_model`."""
    config = ModelConfig(
        folder=folder,
        name="x",
        architecture=architecture or parse_architecture(read_model_config(folder)),
        dtype="float32",
        max_model_len=64,
        load_format="gguf" if folder.is_file() else "safetensors",
        seed=0,
        fingerprint="",
        quantization=quantization or QuantizationConfig(),
        batch_invariant=batch_invariant,
    )
    backend: Any = FullContextAttention()  # Any: a stand-in
    group = tp or TensorParallelGroup()
    return load_model(config, device=torch.device("cpu"), backend=backend, tp=group, served=served)


def bind_caches(model: CausalLM, num_tokens: int) -> None:
    """Gives each layer of a model that was built with `FullContextAttention` a cache for one sequence of `num_tokens`."""
    for layer in model.cached_layers().values():
        spec = layer.kv_cache_spec(num_tokens, torch.float32)
        shape = (num_tokens, spec.num_kv_heads, spec.head_dim)
        layer.bind(torch.empty(2, spec.state_bytes, dtype=torch.uint8) if spec.is_state else torch.empty(2, *shape), 0)


def run_prompt(model: CausalLM, token_ids: Tensor) -> Tensor:
    """Logits of every position of one prompt, of a model built with `FullContextAttention`: [num_tokens, vocab_size]."""
    num_tokens = len(token_ids)
    bind_caches(model, num_tokens)
    inputs = AttentionInputs(
        query_start_loc=np.array([0, num_tokens], dtype=np.int32),
        seq_lens=np.array([num_tokens], dtype=np.int32),
        num_computed_tokens=np.zeros(1, dtype=np.int32),
        block_table=np.ones((1, 1), dtype=np.int32),
    )
    # attention reads nothing of it
    metadata = (StateMetadata(num_tokens=num_tokens, inputs=inputs, num_states=1, block_size=num_tokens),)
    return model.compute_logits(model(ModelStep(token_ids, torch.arange(len(token_ids)), metadata)))
