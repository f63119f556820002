"""GGUF files of mixtures of experts, written after what llama.cpp's converter does with the folders of transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Glm4MoeConfig,
    GraniteMoeConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from tests.support.gguf_files import Number, Stored, floats, quantized, write_gguf
from tests.support.gguf_models import COMMON, deinterleave, interleave, metadata_of, stored_name
from tests.support.gguf_writer import NUMBERED_MTP
from tests.support.model_zoo import write_model
from tests.support.mtp_models import write_mtp_model

_COMMON: dict[str, Any] = {**COMMON, "pad_token_id": None, "num_experts_per_tok": 2}
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen3moe": Qwen3MoeConfig(
        **{**_COMMON, "num_experts_per_tok": 3},
        head_dim=32,
        num_experts=5,
        moe_intermediate_size=512,
        norm_topk_prob=True,
    ),
    "qwen2moe": Qwen2MoeConfig(
        **_COMMON, num_experts=4, moe_intermediate_size=256, shared_expert_intermediate_size=512
    ),
    "llama": MixtralConfig(**_COMMON, num_local_experts=4, sliding_window=None),
    "olmoe": OlmoeConfig(**{**_COMMON, "num_key_value_heads": 4}, num_experts=4),
    "glm4moe": Glm4MoeConfig(
        **{**_COMMON, "num_hidden_layers": 3},
        head_dim=64,
        attention_bias=True,
        use_qk_norm=True,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=256,
        n_shared_experts=2,
        routed_scaling_factor=1.5,
        norm_topk_prob=True,
        first_k_dense_replace=1,
    ),
    "granitemoe": GraniteMoeConfig(
        **_COMMON, num_local_experts=4, attention_multiplier=0.25, logits_scaling=2.0, residual_multiplier=0.5
    ),
}
INTERLEAVED = ("llama", "granitemoe")
# A module of a layer -> its name in the file
_NAMES = {
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "router.layer": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "shared_experts.gate_proj": "ffn_gate_shexp",
    "shared_experts.up_proj": "ffn_up_shexp",
    "shared_experts.down_proj": "ffn_down_shexp",
    "shared_expert.gate_proj": "ffn_gate_shexp",
    "shared_expert.up_proj": "ffn_up_shexp",
    "shared_expert.down_proj": "ffn_down_shexp",
}
_ONE_ROW = "ffn_gate_inp_shexp.weight"  # a vector in the file
_PROJECTIONS = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
_EXPERT = re.compile(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight")
_STACKED = re.compile(r"model\.layers\.(\d+)\.block_sparse_moe\.(input|output)_linear\.weight")
# As files called Q4_K_M have them, roughly
TYPES = {
    "ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q4_K", "ffn_down_exps": "Q6_K", "ffn_gate_up_exps": "Q4_K", "attn_q": "Q4_0",
    "ffn_up_shexp": "Q5_0", "ffn_down_shexp": "Q8_0", "token_embd": "Q8_0",
}  # fmt: skip


def write_mixture(
    folder: Path,
    architecture: str,
    types: Mapping[str, str] = TYPES,
    *,
    merged: bool = False,
    apart: bool = False,
    metadata: Mapping[str, Any] | None = None,
    has_mtp: bool = False,
) -> tuple[Path, Path]:
    """(a folder with plain weights, a GGUF file of the same model). The other arguments are those of `make_mixture`."""
    plain, keys, tensors = make_mixture(folder, architecture, types, merged=merged, apart=apart, has_mtp=has_mtp)
    return plain, write_gguf(folder / "model.gguf", {**keys, **(metadata or {})}, tensors)


def make_mixture(
    folder: Path,
    architecture: str,
    types: Mapping[str, str] = TYPES,
    *,
    merged: bool = False,
    apart: bool = False,
    has_mtp: bool = False,
) -> tuple[Path, dict[str, Any], dict[str, Stored]]:
    """(a folder with plain weights, the metadata and the tensors of a GGUF file of the same model).

    Args:
        types: of matrices; those not named are F32.
        merged: gate and up are one tensor.
        apart: each expert has tensors of its own, as in files of 2023.
        has_mtp: with a layer that predicts drafts; of GLM.
    """
    config = CONFIGS[architecture]
    plain = (write_mtp_model if has_mtp else write_model)(config, folder / "plain", seed=4)
    num_layers = config.num_hidden_layers + has_mtp
    random = np.random.default_rng(4)
    weights = load_file(plain / "model.safetensors")
    tensors: dict[str, Stored] = {}

    def store(name: str, weight: Tensor) -> Tensor:
        """Returns the weight that the file has."""
        stem = name.split(".")[2] if name.startswith("blk.") else name.split(".")[0]
        kind = types.get(stem, "F32") if weight.dim() > 1 else "F32"
        tensors[name] = quantized(kind, tuple(weight.shape), random) if kind.startswith("Q") else floats(weight)
        return tensors[name].weight

    for layer in range(_first_sparse(config), num_layers):
        experts = _experts(weights, layer)
        block = f"blk.{layer}"
        if merged:
            both = torch.cat((experts.pop("gate"), experts.pop("up")), dim=1)
            experts["gate"], experts["up"] = store(f"{block}.ffn_gate_up_exps.weight", both).chunk(2, dim=1)
            experts["down"] = store(f"{block}.ffn_down_exps.weight", experts["down"])
        elif apart:
            for projection, stack in experts.items():
                stored = [store(f"{block}.ffn_{projection}.{i}.weight", each) for i, each in enumerate(stack)]
                experts[projection] = torch.stack(stored)
        else:
            experts = {key: store(f"{block}.ffn_{key}_exps.weight", stack) for key, stack in experts.items()}
        _put_experts(weights, layer, experts)
    for name, weight in _others(weights).items():
        whole, is_interleaved = _place(architecture, name)
        as_stored = interleave(weight, 64) if is_interleaved else weight
        as_read = store(whole, as_stored[0] if whole.endswith(_ONE_ROW) else as_stored)
        weights[name] = (deinterleave(as_read, 64) if is_interleaved else as_read).view(weight.shape).contiguous()
    save_file(weights, plain / "model.safetensors", {"format": "pt"})
    keys = _metadata(architecture, config)
    if has_mtp:
        counts = {"block_count": Number("I", num_layers), "nextn_predict_layers": Number("I", 1)}
        keys |= {f"{architecture}.{name}": value for name, value in counts.items()}
    return plain, keys, tensors


def put_weights(plain: Path, architecture: str, stored: Mapping[str, Tensor]) -> None:
    """The folder `plain` gets the weights of a GGUF file, by their names in it."""
    weights = load_file(plain / "model.safetensors")
    for layer in range(_first_sparse(CONFIGS[architecture]), CONFIGS[architecture].num_hidden_layers):
        experts = {key: stored[f"blk.{layer}.ffn_{key}_exps.weight"] for key in ("gate", "up", "down")}
        shapes = {key: each.shape for key, each in _experts(weights, layer).items()}
        _put_experts(weights, layer, {key: each.view(shapes[key]) for key, each in experts.items()})
    for name, weight in _others(weights).items():
        whole, is_interleaved = _place(architecture, name)
        found = stored[whole].view(weight.shape)
        weights[name] = (deinterleave(found, 64) if is_interleaved else found).contiguous()
    save_file(weights, plain / "model.safetensors", {"format": "pt"})


def _first_sparse(config: Any) -> int:  # Any: fields of several classes
    return getattr(config, "first_k_dense_replace", 0)


def _others(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All weights but those of experts."""
    return {
        name: weight for name, weight in weights.items() if not (_EXPERT.fullmatch(name) or _STACKED.fullmatch(name))
    }


def _place(architecture: str, name: str) -> tuple[str, bool]:
    """The name in the file, and whether the rows of heads are interleaved there."""
    if name.endswith(".e_score_correction_bias"):
        return f"blk.{name.split('.')[2]}.exp_probs_b.bias", False
    if architecture == "glm4moe" and name.endswith(".post_attention_layernorm.weight"):
        return f"blk.{name.split('.')[2]}.post_attention_norm.weight", False
    module = name.split(".", 3)[-1]
    if module in NUMBERED_MTP:
        return f"blk.{name.split('.')[2]}.nextn.{NUMBERED_MTP[module]}.weight", False
    own = next((stem for module, stem in _NAMES.items() if name.endswith(f".{module}.weight")), None)
    whole = f"blk.{name.split('.')[2]}.{own}.weight" if own else stored_name(architecture, name)[1]
    return whole, architecture in INTERLEAVED and (".q_proj." in name or ".k_proj." in name)


def _experts(weights: Mapping[str, Tensor], layer: int) -> dict[str, Tensor]:
    """gate, up and down of a layer: [experts, rows, columns]"""
    found: dict[str, list[Tensor]] = {"gate": [], "up": [], "down": []}
    for name in sorted(weights, key=lambda each: [int(part) if part.isdigit() else 0 for part in each.split(".")]):
        single, stacked = _EXPERT.fullmatch(name), _STACKED.fullmatch(name)
        if single and int(single[1]) == layer:
            found[_PROJECTIONS[single[3]]].append(weights[name])
        if stacked and int(stacked[1]) == layer:
            parts = weights[name].chunk(2, dim=1) if stacked[2] == "input" else (weights[name],)
            return_to = ("gate", "up") if stacked[2] == "input" else ("down",)
            for projection, part in zip(return_to, parts, strict=True):
                found[projection] = list(part)
    return {projection: torch.stack(each) for projection, each in found.items()}


def _put_experts(weights: dict[str, Tensor], layer: int, experts: Mapping[str, Tensor]) -> None:
    for name in weights:
        single, stacked = _EXPERT.fullmatch(name), _STACKED.fullmatch(name)
        if single and int(single[1]) == layer:
            weights[name] = experts[_PROJECTIONS[single[3]]][int(single[2])].contiguous()
        if stacked and int(stacked[1]) == layer:
            of_input = torch.cat((experts["gate"], experts["up"]), dim=1)
            weights[name] = (of_input if stacked[2] == "input" else experts["down"]).contiguous()


def _metadata(architecture: str, config: Any) -> dict[str, Any]:  # Any: fields of several classes
    if architecture == "glm4moe":
        return _routing(config)
    num_experts = getattr(config, "num_experts", None) or config.num_local_experts
    fields = {"expert_count": Number("I", num_experts), "expert_used_count": Number("I", config.num_experts_per_tok)}
    if architecture in ("qwen3moe", "qwen2moe"):
        fields["expert_feed_forward_length"] = Number("I", config.moe_intermediate_size)
    if architecture == "qwen2moe":
        fields["expert_shared_feed_forward_length"] = Number("I", config.shared_expert_intermediate_size)
    if architecture == "qwen3moe":
        fields |= {f"attention.{name}_length": Number("I", config.head_dim) for name in ("key", "value")}
    if architecture == "granitemoe":
        fields |= {
            "attention.scale": Number("f", config.attention_multiplier),
            "embedding_scale": Number("f", config.embedding_multiplier),
            "residual_scale": Number("f", config.residual_multiplier),
            "logit_scale": Number("f", config.logits_scaling),
        }
    base = metadata_of(architecture, config)
    base[f"{architecture}.rope.freq_base"] = Number("f", config.rope_parameters["rope_theta"])
    return base | {f"{architecture}.{name}": value for name, value in fields.items()}


def _routing(config: Glm4MoeConfig) -> dict[str, Any]:
    fields = {
        "rope.dimension_count": Number("I", config.head_dim // 2),
        "attention.key_length": Number("I", config.head_dim),
        "attention.value_length": Number("I", config.head_dim),
        "expert_count": Number("I", config.n_routed_experts),
        "expert_used_count": Number("I", config.num_experts_per_tok),
        "expert_feed_forward_length": Number("I", config.moe_intermediate_size),
        "expert_shared_count": Number("I", config.n_shared_experts),
        "expert_group_count": Number("I", config.n_group),
        "expert_group_used_count": Number("I", config.topk_group),
        "expert_gating_func": Number("I", 2),
        "expert_weights_scale": Number("f", config.routed_scaling_factor),
        "expert_weights_norm": config.norm_topk_prob,
        "leading_dense_block_count": Number("I", config.first_k_dense_replace),
        "rope.freq_base": Number("f", config.rope_parameters["rope_theta"]),
    }
    return metadata_of("glm4moe", config) | {f"glm4moe.{name}": value for name, value in fields.items()}
