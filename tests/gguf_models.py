"""Small models as GGUF files, beside the same model in plain safetensors: llama.cpp's names, metadata and order of rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    Olmo2Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from tests.gguf_files import Number, Stored, floats, quantized, write_gguf
from tests.model_zoo import write_model

_COMMON: dict[str, Any] = {
    "vocab_size": 203,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_COMMON, attention_bias=True),
    "qwen2": Qwen2Config(**_COMMON, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**_COMMON, head_dim=32),
    "gemma2": Gemma2Config(**_COMMON, head_dim=64, query_pre_attn_scalar=64, sliding_window=9),
    "gemma3": Gemma3TextConfig(
        **{**_COMMON, "num_hidden_layers": 7}, head_dim=64, query_pre_attn_scalar=64, sliding_window=9
    ),
    "olmo2": Olmo2Config(**_COMMON),
    "smollm3": SmolLM3Config(**{**_COMMON, "num_hidden_layers": 4, "pad_token_id": None}),
    "granite": GraniteConfig(
        **_COMMON, attention_multiplier=0.0625, logits_scaling=2.0, embedding_multiplier=0.5, residual_multiplier=0.5
    ),
}
# Every type is there; a mixture like this is what files called Q4_K_M hold.
TYPES = {
    "attn_q": "Q4_0",
    "attn_k": "Q4_1",
    "attn_v": "Q6_K",
    "attn_output": "Q5_0",
    "ffn_gate": "Q4_K",
    "ffn_up": "Q5_K",
    "ffn_down": "Q5_1",
    "token_embd": "Q8_0",
    "output": "F16",
}
NAMES = {
    "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
    "q_norm": "attn_q_norm", "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip
THETAS = {"gemma3": 1e6, "smollm3": 2e6}
INTERLEAVED = ("llama", "smollm3", "granite")
NAMES_OF_GEMMA = {
    **NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def metadata_of(architecture: str, config: PreTrainedConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "block_count": Number("I", config.num_hidden_layers),
        "context_length": Number("I", config.max_position_embeddings),
        "embedding_length": Number("I", config.hidden_size),
        "feed_forward_length": Number("I", config.intermediate_size),
        "attention.head_count": Number("I", config.num_attention_heads),
        "attention.head_count_kv": Number("I", config.num_key_value_heads),
        "attention.layer_norm_rms_epsilon": Number("f", config.rms_norm_eps),
        "rope.freq_base": Number("f", THETAS.get(architecture, 10000.0)),
    }
    if architecture.startswith("gemma"):
        fields["attention.sliding_window"] = Number("I", config.sliding_window)
    if architecture == "gemma2":
        fields |= {f"{name}_logit_softcapping": Number("f", value) for name, value in (("attn", 50.0), ("final", 30.0))}
    if architecture in INTERLEAVED:
        fields["rope.dimension_count"] = Number("I", config.hidden_size // config.num_attention_heads)
    if architecture == "granite":
        multipliers = {"attention.scale": config.attention_multiplier, "embedding_scale": config.embedding_multiplier}
        multipliers |= {"residual_scale": config.residual_multiplier, "logit_scale": config.logits_scaling}
        fields |= {name: Number("f", value) for name, value in multipliers.items()}
    if architecture == "llama":
        fields["vocab_size"] = Number("I", config.vocab_size)
    if architecture in ("qwen3", "gemma2", "gemma3"):
        fields |= {f"attention.{name}_length": Number("I", config.head_dim) for name in ("key", "value")}
    return {
        "general.architecture": architecture,
        "general.name": "x",
        **{f"{architecture}.{name}": value for name, value in fields.items()},
        "tokenizer.ggml.bos_token_id": Number("I", 1),
        "tokenizer.ggml.eos_token_id": Number("I", 2),
    }


def write_pair(
    folder: Path, architecture: str, types: Mapping[str, str] = TYPES, metadata: Mapping[str, Any] | None = None
) -> tuple[Path, Path]:
    """(a folder with plain weights, a GGUF file of the same model). `types`: of matrices; those not named are F32."""
    config = CONFIGS[architecture]
    plain = write_model(config, folder / "plain", seed=4)
    random = np.random.default_rng(4)
    weights = load_file(plain / "model.safetensors")
    tensors: dict[str, Stored] = {}
    for name, weight in weights.items():
        *_, module, suffix = name.split(".")
        layer = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
        is_gemma = architecture.startswith("gemma")
        stem = (NAMES_OF_GEMMA if is_gemma or architecture == "olmo2" else NAMES)[module]
        kind = types.get(stem, "F32") if weight.dim() == 2 else "F32"
        is_interleaved = architecture in INTERLEAVED and module in ("q_proj", "k_proj")
        as_stored = interleave(weight, 64) if is_interleaved else weight
        if is_gemma and stem.endswith("norm"):
            as_stored = weight + 1
        if kind.startswith("Q"):
            stored = quantized(kind, tuple(weight.shape), random)
        else:
            stored = floats(as_stored.to({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]))
        tensors[f"{layer}{stem}.{suffix}"] = stored
        float_weight = weight if is_gemma and stem.endswith("norm") else stored.weight.float()
        weights[name] = (deinterleave(float_weight, 64) if is_interleaved else float_weight).contiguous()
    save_file(weights, plain / "model.safetensors")
    file = write_gguf(folder / "model.gguf", {**metadata_of(architecture, config), **(metadata or {})}, tensors)
    return plain, file


def interleave(weight: Tensor, head_dim: int) -> Tensor:
    """As llama.cpp's converter does to Llama's queries and keys: rows i and i + head_dim / 2 of a head become neighbours."""
    rows = list(weight)
    out = []
    for head in range(0, len(rows), head_dim):
        for i in range(head_dim // 2):
            out += [rows[head + i], rows[head + head_dim // 2 + i]]
    return torch.stack(out)


def deinterleave(weight: Tensor, head_dim: int) -> Tensor:
    rows = list(weight)
    out = []
    for head in range(0, len(rows), head_dim):
        out += [rows[head + 2 * i] for i in range(head_dim // 2)] + [
            rows[head + 2 * i + 1] for i in range(head_dim // 2)
        ]
    return torch.stack(out)
