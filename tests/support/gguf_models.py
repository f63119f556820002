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
    Glm4Config,
    GraniteConfig,
    Lfm2Config,
    LlamaConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    SmolLM3Config,
)

from tests.support.gguf_files import Number, Stored, floats, quantized, write_gguf, write_parts
from tests.support.model_zoo import write_model

COMMON: dict[str, Any] = {
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
    "llama": LlamaConfig(**COMMON, attention_bias=True),
    "qwen2": Qwen2Config(**COMMON, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**COMMON, head_dim=32),
    "gemma2": Gemma2Config(**COMMON, head_dim=64, query_pre_attn_scalar=64, sliding_window=9),
    "gemma3": Gemma3TextConfig(
        **{**COMMON, "num_hidden_layers": 7}, head_dim=64, query_pre_attn_scalar=64, sliding_window=9
    ),
    "olmo2": Olmo2Config(**COMMON),
    "smollm3": SmolLM3Config(**{**COMMON, "num_hidden_layers": 4, "pad_token_id": None}),
    "granite": GraniteConfig(
        **COMMON, attention_multiplier=0.0625, logits_scaling=2.0, embedding_multiplier=0.5, residual_multiplier=0.5
    ),
    "phi3": Phi3Config(
        **COMMON,
        pad_token_id=0,
        sliding_window=9,
        original_max_position_embeddings=64,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0 + i / 8 for i in range(24)],
            "long_factor": [3.0 + i for i in range(24)],
        },
    ),
    "glm4": Glm4Config(**COMMON, head_dim=64, attention_bias=True, pad_token_id=0),
    "lfm2": Lfm2Config(**COMMON, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
    "qwen35": Qwen3_5TextConfig(
        **{**COMMON, "num_hidden_layers": 4},
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=64,
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
    "attn_qkv": "Q5_1",
    "ssm_out": "Q4_1",
    "shortconv.in_proj": "Q5_0",
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
THETAS = {"gemma3": 1e6, "lfm2": 1e6, "smollm3": 2e6}
INTERLEAVED = ("llama", "smollm3", "granite")
NAMES_OF_GEMMA = {
    **NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# Of a family, or of a model without a layer's prefix -> stored names
OWN_NAMES = {
    "phi3": {"qkv_proj": "attn_qkv", "gate_up_proj": "ffn_up"},
    "glm4": {
        "gate_up_proj": "ffn_up",
        "post_self_attn_layernorm": "post_attention_norm",
        "post_mlp_layernorm": "post_ffw_norm",
        "post_attention_layernorm": "ffn_norm",
    },
    "lfm2": {
        "embedding_norm": "token_embd_norm",
        "operator_norm": "attn_norm",
        "ffn_norm": "ffn_norm",
        "out_proj": "attn_output",
        "q_layernorm": "attn_q_norm",
        "k_layernorm": "attn_k_norm",
        "w1": "ffn_gate",
        "w2": "ffn_down",
        "w3": "ffn_up",
        "conv.conv": "shortconv.conv",
        "conv.in_proj": "shortconv.in_proj",
        "conv.out_proj": "shortconv.out_proj",
    },
    "qwen35": {
        "post_attention_layernorm": "post_attention_norm",
        "in_proj_qkv": "attn_qkv",
        "in_proj_z": "attn_gate",
        "in_proj_b": "ssm_beta",
        "in_proj_a": "ssm_alpha",
        "conv1d": "ssm_conv1d",
        "linear_attn.norm": "ssm_norm",
        "linear_attn.A_log": "ssm_a",
        "linear_attn.dt_bias": "ssm_dt.bias",
        "linear_attn.out_proj": "ssm_out",
    },
}
ONE_PLUS = ("gemma2", "gemma3", "qwen35")  # the converter adds 1 to the weights of norms


def stored_name(architecture: str, name: str) -> tuple[str, str]:
    """(the stem, the whole name) of a tensor in the file."""
    outer, module, last = f"..{name}".split(".")[-3:]
    own = OWN_NAMES.get(architecture, {})
    is_gemma = architecture.startswith("gemma") or architecture == "olmo2"
    layer = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
    if f"{module}.{last}" in own:  # not followed by "weight"
        return own[f"{module}.{last}"], layer + own[f"{module}.{last}"]
    stem = own.get(f"{outer}.{module}") or own.get(module) or (NAMES_OF_GEMMA if is_gemma else NAMES)[module]
    return stem, f"{layer}{stem}.{last}"


def metadata_of(architecture: str, config: PreTrainedConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "block_count": Number("I", config.num_hidden_layers),
        "context_length": Number("I", config.max_position_embeddings),
        "embedding_length": Number("I", config.hidden_size),
        "feed_forward_length": Number("I", config.intermediate_size),
        "attention.head_count": Number("I", config.num_attention_heads),
        "attention.head_count_kv": Number("I", config.num_key_value_heads),
        "attention.layer_norm_rms_epsilon": Number("f", getattr(config, "rms_norm_eps", 1e-5)),
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
    if architecture in ("phi3", "glm4", "qwen35"):
        rope = config.rope_parameters
        fields["rope.dimension_count"] = Number("I", int(64 * rope["partial_rotary_factor"]))
    if architecture == "phi3":
        fields["rope.scaling.original_context_length"] = Number("I", 64)
        fields["attention.sliding_window"] = Number("I", config.sliding_window or 0)
    if architecture == "lfm2":
        fields["attention.head_count_kv"] = Number("I", [0, config.num_key_value_heads])
        fields["attention.layer_norm_rms_epsilon"] = Number("f", config.norm_eps)
        fields["shortconv.l_cache"] = Number("I", config.conv_L_cache)
    if architecture == "qwen35":
        fields |= {
            "ssm.conv_kernel": Number("I", config.linear_conv_kernel_dim),
            "ssm.state_size": Number("I", config.linear_key_head_dim),
            "ssm.group_count": Number("I", config.linear_num_key_heads),
            "ssm.time_step_rank": Number("I", config.linear_num_value_heads),
            "ssm.inner_size": Number("I", config.linear_num_value_heads * config.linear_value_head_dim),
            "full_attention_interval": Number("I", 4),
            "rope.dimension_sections": Number("I", [11, 11, 10, 0]),
        }
    if architecture == "llama":
        fields["vocab_size"] = Number("I", config.vocab_size)
    if architecture in ("qwen3", "qwen3vl", "qwen3vlmoe", "gemma2", "gemma3", "glm4", "qwen35"):
        fields |= {f"attention.{name}_length": Number("I", config.head_dim) for name in ("key", "value")}
    return {
        "general.architecture": architecture,
        "general.name": "x",
        **{f"{architecture}.{name}": value for name, value in fields.items()},
        "tokenizer.ggml.bos_token_id": Number("I", 1),
        "tokenizer.ggml.eos_token_id": Number("I", 2),
    }


def write_pair(
    folder: Path,
    architecture: str,
    types: Mapping[str, str] = TYPES,
    metadata: Mapping[str, Any] | None = None,
    num_parts: int = 1,
    more: Mapping[str, Stored] | None = None,
) -> tuple[Path, Path]:
    """(a folder with plain weights, a GGUF file of the same model). `types`: of matrices; those not named are F32. If
    `num_parts` is more than 1, the file is the first part. `more`: tensors that only the file has."""
    config = CONFIGS[architecture]
    plain = write_model(config, folder / "plain", seed=4)
    random = np.random.default_rng(4)
    weights = load_file(plain / "model.safetensors")
    tensors: dict[str, Stored] = {}
    for name, weight in weights.items():
        stem, whole = stored_name(architecture, name)
        kind = types.get(stem, "F32") if weight.dim() == 2 else "F32"
        changed = as_stored(architecture, stem, weight)
        is_interleaved = architecture in INTERLEAVED and stem in ("attn_q", "attn_k")
        if kind.startswith("Q"):
            stored = quantized(kind, tuple(weight.shape), random)
        else:
            stored = floats(changed.to({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]))
        tensors[whole] = stored
        float_weight = stored.weight.float() if changed is weight or is_interleaved else weight
        weights[name] = (deinterleave(float_weight, 64) if is_interleaved else float_weight).contiguous()
    if architecture == "phi3":
        for length in ("short", "long"):
            factors = torch.tensor(config.rope_parameters[f"{length}_factor"])
            tensors[f"rope_factors_{length}.weight"] = floats(factors)
    save_file(weights, plain / "model.safetensors")
    tensors |= more or {}
    keys = {**metadata_of(architecture, config), **(metadata or {})}
    if num_parts > 1:
        return plain, write_parts(folder, keys, tensors, num_parts)[0]
    return plain, write_gguf(folder / "model.gguf", keys, tensors)


def as_stored(architecture: str, stem: str, weight: Tensor) -> Tensor:
    """A weight as the converter writes it, under the name `stem`."""
    if architecture in INTERLEAVED and stem in ("attn_q", "attn_k"):
        return interleave(weight, 64)
    if weight.dim() == 3:
        return weight[:, 0]
    if stem == "ssm_a":
        return -weight.exp()
    if architecture in ONE_PLUS and stem.endswith("norm") and stem != "ssm_norm":
        return weight + 1
    return weight


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
