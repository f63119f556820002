"""Small models of families with latent attention, recurrent layers or short convolutions as GGUF files: written by the package
`gguf`, with the names, metadata and order of rows of llama.cpp's converter, beside folders with the same weights.

The converter permutes and divides weights. Here the same is done with the numbers of elements instead of weights: all elements
of a folder are numbered, and a tensor of the file is a tensor of such numbers. So a quantized tensor of the file says which
elements the folder must have, and no second function must undo the first one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Gemma4TextConfig,
    HunYuanMoEV1Config,
    Lfm2MoeConfig,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from tests.support.model_zoo import write_model
from tests.support.mtp_models import write_mtp_model

Numbers = dict[str, Tensor]  # name -> int64, of the shape of the tensor

_SIZES: dict[str, Any] = {
    "vocab_size": 203,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_GATED_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
_HYBRID: dict[str, Any] = {
    **_SIZES,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
_LATENT: dict[str, Any] = {
    **_SIZES,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 64,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
}
_GEMMA: dict[str, Any] = {
    **_SIZES,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_EVEN = {"mscale": 1.0, "mscale_all_dim": 1.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
# name of a case -> (the file's general.architecture, configuration)
CASES: dict[str, tuple[str, PreTrainedConfig]] = {
    "qwen35": ("qwen35", Qwen3_5TextConfig(**_HYBRID)),
    "qwen35moe": ("qwen35moe", Qwen3_5MoeTextConfig(**_HYBRID, **_GATED_EXPERTS)),
    "qwen3next": ("qwen3next", Qwen3NextConfig(**_HYBRID, **_GATED_EXPERTS)),
    "qwen3next, 2025": ("qwen3next", Qwen3NextConfig(**_HYBRID, **_GATED_EXPERTS)),
    "hunyuan-moe": (
        "hunyuan-moe",
        HunYuanMoEV1Config(**_SIZES, head_dim=16, num_experts=6, moe_topk=3, moe_intermediate_size=96, num_shared_expert=1),
    ),
    "phimoe": (
        "phimoe",
        PhimoeConfig(
            **_SIZES,
            num_local_experts=6,
            router_jitter_noise=0.01,
            attention_bias=True,
            lm_head_bias=True,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0 + i / 8 for i in range(8)],
                "long_factor": [3.0 + i for i in range(8)],
                "short_mscale": 1.243163121016122,
                "long_mscale": 1.243163121016122,
                "original_max_position_embeddings": 64,
            },
        ),
    ),
    "lfm2moe": (
        "lfm2moe",
        Lfm2MoeConfig(
            **{**_SIZES, "num_hidden_layers": 3},
            layer_types=["conv", "full_attention", "conv"],
            num_dense_layers=1,
            num_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
        ),
    ),
    "gemma4": (
        "gemma4",
        Gemma4TextConfig(
            **{**_GEMMA, "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3},
            num_kv_shared_layers=2,
            use_double_wide_mlp=True,
            hidden_size_per_layer_input=32,
            vocab_size_per_layer_input=203,
            final_logit_softcapping=20.0,
        ),
    ),
    "gemma4, experts": (
        "gemma4",
        Gemma4TextConfig(
            **_GEMMA,
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
            hidden_size_per_layer_input=0,
            enable_moe_block=True,
            num_experts=6,
            top_k_experts=3,
            moe_intermediate_size=32,
        ),
    ),
    "ernie4_5-moe": (
        "ernie4_5-moe",
        Ernie4_5_MoeConfig(**_SIZES, moe_num_experts=6, moe_k=3, moe_intermediate_size=32, moe_num_shared_experts=2),
    ),
    "deepseek2": (
        "deepseek2",
        DeepseekV2Config(
            **_LATENT,
            q_lora_rank=None,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            rope_parameters={**_YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
        ),
    ),
    "deepseek2, sigmoids": (
        "deepseek2",
        DeepseekV3Config(**_LATENT, q_lora_rank=32, n_group=4, topk_group=2, rope_parameters=_YARN | _EVEN),
    ),
}  # fmt: skip

_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_STEMS = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    # recurrent layers
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    # latent attention
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "self_attn.kv_b_proj.weight": "attn_kv_b.weight",
    # LFM2
    "operator_norm.weight": "attn_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "self_attn.out_proj.weight": "attn_output.weight",
    "self_attn.q_layernorm.weight": "attn_q_norm.weight",
    "self_attn.k_layernorm.weight": "attn_k_norm.weight",
    "conv.conv.weight": "shortconv.conv.weight",
    "conv.in_proj.weight": "shortconv.in_proj.weight",
    "conv.out_proj.weight": "shortconv.out_proj.weight",
    "feed_forward.gate.weight": "ffn_gate_inp.weight",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "feed_forward.w1.weight": "ffn_gate.weight",
    "feed_forward.w2.weight": "ffn_down.weight",
    "feed_forward.w3.weight": "ffn_up.weight",
}
_STEMS |= {  # Hunyuan and Phi-3.5-MoE
    "self_attn.query_layernorm.weight": "attn_q_norm.weight",
    "self_attn.key_layernorm.weight": "attn_k_norm.weight",
    "mlp.gate.wg.weight": "ffn_gate_inp.weight",
    "mlp.shared_mlp.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_mlp.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_mlp.down_proj.weight": "ffn_down_shexp.weight",
    "block_sparse_moe.gate.weight": "ffn_gate_inp.weight",
    "input_layernorm.bias": "attn_norm.bias",
    "post_attention_layernorm.bias": "ffn_norm.bias",
    **{f"self_attn.{name}_proj.bias": f"attn_{name}.bias" for name in "qkv"},
    "self_attn.o_proj.bias": "attn_output.bias",
}
_STEMS |= {  # Gemma 4
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
    "layer_scalar": "layer_output_scale.weight",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "per_layer_input_gate.weight": "inp_gate.weight",
    "per_layer_projection.weight": "proj.weight",
    "post_per_layer_input_norm.weight": "post_norm.weight",
}
_OUTER = {
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.norm.bias": "output_norm.bias",
    "lm_head.bias": "output.bias",
    "model.embedding_norm.weight": "token_embd_norm.weight",
    "lm_head.weight": "output.weight",
}
_EXPERT = re.compile(r"\w+\.experts\.(\d+)\.(\w+)\.weight")
_PROJECTIONS = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
_FLOATS = (
    "_norm.weight",
    "exp_probs_b.bias",
    "ffn_gate_inp.weight",
    "conv1d.weight",
    "shortconv.conv.weight",
)  # as the converter keeps them


_OF_MTP = {
    "mtp.fc.weight": "eh_proj",
    "mtp.norm.weight": "shared_head_norm",
    "mtp.pre_fc_norm_embedding.weight": "enorm",
    "mtp.pre_fc_norm_hidden.weight": "hnorm",
}
# The same in families that number the layer
NUMBERED_MTP = {
    "eh_proj.weight": "eh_proj",
    "shared_head.norm.weight": "shared_head_norm",
    "enorm.weight": "enorm",
    "hnorm.weight": "hnorm",
}


def write_file(
    folder: Path,
    case: str,
    kind: GGMLQuantizationType = GGMLQuantizationType.Q8_0,
    *,
    joins_keys_and_values: bool = False,
    change: Callable[[GGUFWriter], None] | None = None,
    has_mtp: bool = False,
    config: PreTrainedConfig | None = None,
) -> tuple[Path, Path]:
    """(a folder with floats, a GGUF file with the same weights).

    Args:
        kind: of matrices, except for those that the converter keeps in F32.
        joins_keys_and_values: as in files of deepseek2 before May 2025.
        change: called with the writer before the metadata is written.
        has_mtp: with a layer that predicts drafts.
        config: another model of the same architecture.
    """
    architecture = CASES[case][0]
    config = config or CASES[case][1]
    plain = (write_mtp_model if has_mtp else write_model)(config, folder / "plain", seed=6)
    weights = load_file(plain / "model.safetensors")
    values = torch.cat([weight.flatten() for weight in weights.values()])
    starts = torch.tensor([0, *(weight.numel() for weight in weights.values())]).cumsum(0).tolist()
    numbers = {
        name: torch.arange(start, start + weight.numel()).view(weight.shape)
        for start, (name, weight) in zip(starts, weights.items(), strict=False)
    }
    writer = GGUFWriter(folder / "model.gguf", architecture)
    _add_metadata(writer, architecture, config, joins_keys_and_values)
    if has_mtp:
        writer.kv_data[0].pop(f"{architecture}.block_count")
        writer.add_block_count(config.num_hidden_layers + 1)
        writer.add_nextn_predict_layers(1)
    if change is not None:
        change(writer)
    for name, places in _stored(case, config, numbers, joins_keys_and_values).items():
        has_one = architecture.startswith("qwen") and name.endswith("norm.weight") and "ssm_norm" not in name
        floats = values[places] + 1 if has_one else values[places]
        if name.endswith(".ssm_a"):
            floats = -floats.exp()
        is_float = places.dim() == 1 or name.endswith(_FLOATS) or kind == GGMLQuantizationType.F32
        used = GGMLQuantizationType.F32 if is_float else kind
        blocks = gguf.quantize(floats.contiguous().numpy(), used)
        writer.add_tensor(name, blocks, raw_dtype=used)
        if not is_float:
            values[places] = torch.from_numpy(gguf.dequantize(blocks, used))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    stored = {name: values[places].contiguous() for name, places in numbers.items()}
    save_file(stored, plain / "model.safetensors", {"format": "pt"})
    return plain, folder / "model.gguf"


def _stored(case: str, config: Any, given: Numbers, joins_keys_and_values: bool) -> Numbers:  # Any: some class
    architecture = CASES[case][0]
    found: Numbers = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for given_name, places in given.items():
        name = given_name.replace("mtp.layers.0.", f"model.layers.{config.num_hidden_layers}.")
        if name in _OF_MTP:
            found[f"blk.{config.num_hidden_layers}.nextn.{_OF_MTP[name]}.weight"] = places
            continue
        in_layer = _IN_LAYER.fullmatch(name)
        if in_layer is None:
            found[_OUTER[name]] = places
            continue
        block, module = f"blk.{in_layer[1]}.", in_layer[2]
        if module in NUMBERED_MTP:
            found[f"{block}nextn.{NUMBERED_MTP[module]}.weight"] = places
            continue
        expert = _EXPERT.fullmatch(module)
        if expert is not None:
            stack = f"{block}ffn_{_PROJECTIONS[expert[2]]}_exps.weight"
            experts.setdefault(stack, {})[int(expert[1])] = places
        elif module == "mlp.experts.gate_up_proj":
            gate, up = places.chunk(2, dim=1)
            found |= {f"{block}ffn_gate_exps.weight": gate, f"{block}ffn_up_exps.weight": up}
        elif module == "mlp.experts.down_proj":
            found[f"{block}ffn_down_exps.weight"] = places
        elif module == "mlp.shared_expert_gate.weight":
            found[f"{block}ffn_gate_inp_shexp.weight"] = places[0]
        elif module == "post_attention_layernorm.weight" and architecture != "gemma4":
            stem = "post_attention_norm" if architecture.startswith("qwen") else "ffn_norm"
            found[f"{block}{stem}.weight"] = places
        elif module == "linear_attn.in_proj_qkvz.weight" and case.endswith("2025"):
            found[f"{block}ssm_in.weight"] = places
        elif module == "linear_attn.in_proj_qkvz.weight":
            qkv, gate = _without_groups(places, config)
            found |= {f"{block}attn_qkv.weight": qkv, f"{block}attn_gate.weight": gate}
        elif module == "self_attn.kv_b_proj.weight" and not joins_keys_and_values:
            heads = places.view(config.num_attention_heads, -1, config.kv_lora_rank)
            found[f"{block}attn_k_b.weight"] = heads[:, : config.qk_nope_head_dim].transpose(1, 2)
            found[f"{block}attn_v_b.weight"] = heads[:, config.qk_nope_head_dim :]
        else:
            is_tiled = architecture in ("qwen35", "qwen35moe") and module.startswith("linear_attn.")
            squeezed = places[:, 0] if "conv" in module and places.dim() == 3 else places
            found[block + _STEMS[module]] = _tile(module, squeezed, config) if is_tiled else squeezed
    return found | {name: torch.stack([stack[i] for i in range(len(stack))]) for name, stack in experts.items()}


def _without_groups(places: Tensor, config: Any) -> tuple[Tensor, Tensor]:  # Any: Qwen3NextConfig
    """Queries, keys and values of all heads, and gates of all heads. In the folder, a key head's rows of all four are
    neighbours."""
    num_heads, size = config.linear_num_key_heads, config.linear_key_head_dim
    of_values = config.linear_num_value_heads // num_heads * config.linear_value_head_dim
    parts: list[list[Tensor]] = [[], [], [], []]
    for head in places.chunk(num_heads):
        for part, rows in zip(parts, torch.split(head, [size, size, of_values, of_values]), strict=True):
            part.append(rows)
    return torch.cat([*parts[0], *parts[1], *parts[2]]), torch.cat(parts[3])


def _tile(module: str, places: Tensor, config: Any) -> Tensor:  # Any: Qwen3_5TextConfig or that with experts
    """The first value heads of all key heads, then the second ones, and so on."""
    num_keys, num_values = config.linear_num_key_heads, config.linear_num_value_heads
    each = num_values // num_keys
    order = [key * each + index for index in range(each) for key in range(num_keys)]

    def tiled(rows: Tensor) -> Tensor:
        heads = rows.chunk(num_values)
        return torch.cat([heads[index] for index in order])

    if module in ("linear_attn.in_proj_qkv.weight", "linear_attn.conv1d.weight"):
        before = 2 * num_keys * config.linear_key_head_dim
        return torch.cat([places[:before], tiled(places[before:])])
    if module == "linear_attn.out_proj.weight":
        return tiled(places.T).T
    return places if module == "linear_attn.norm.weight" else tiled(places)


def _add_metadata(writer: GGUFWriter, architecture: str, config: Any, joined: bool) -> None:  # Any: some class
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    if not getattr(config, "use_double_wide_mlp", False):
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if architecture != "gemma4":
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.norm_eps if architecture == "lfm2moe" else config.rms_norm_eps)
    writer.add_eos_token_id(2)
    if architecture not in ("qwen35", "gemma4"):
        names = ("n_routed_experts", "num_local_experts", "num_experts")
        writer.add_expert_count(next(found for name in names if (found := getattr(config, name, None))))
        writer.add_expert_used_count(config.moe_topk if architecture == "hunyuan-moe" else config.num_experts_per_tok)
    if architecture not in ("qwen35", "gemma4", "phimoe"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture.startswith("qwen"):
        _add_hybrid(writer, architecture, config)
    elif architecture == "lfm2moe":
        heads = config.num_key_value_heads
        writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in config.layer_types])
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_vocab_size(config.vocab_size)
        writer.add_shortconv_l_cache(config.conv_L_cache)
    elif architecture == "hunyuan-moe":
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_expert_shared_count(1)
        writer.add_expert_shared_feed_forward_length(config.intermediate_size)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_rope_scaling_factor(1)
    elif architecture == "phimoe":
        _add_phi(writer, config)
    elif architecture == "gemma4":
        _add_gemma(writer, config)
    elif architecture == "ernie4_5-moe":
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
        writer.add_expert_shared_count(config.moe_num_shared_experts)
        writer.add_expert_shared_feed_forward_length(config.intermediate_size // config.num_key_value_heads)
    else:
        _add_latent(writer, config, joined)


def _add_hybrid(writer: GGUFWriter, architecture: str, config: Any) -> None:  # Any: a class of Qwen
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    if architecture != "qwen35":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    writer.add_full_attention_interval(4)
    writer.add_rope_dimension_count(config.head_dim // 4)
    if architecture != "qwen3next":
        writer.add_rope_dimension_sections([11, 11, 10, 0])


def _add_phi(writer: GGUFWriter, config: PhimoeConfig) -> None:
    rope = config.rope_parameters
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_attn_factors(1.19)  # Phi-3's, not what the model computes with
    writer.add_sliding_window(0)
    for name in ("long", "short"):
        writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))


def _add_gemma(writer: GGUFWriter, config: Gemma4TextConfig) -> None:
    head_dim, of_full, heads = (_GEMMA[name] for name in ("head_dim", "global_head_dim", "num_key_value_heads"))
    windowed = [kind == "sliding_attention" for kind in config.layer_types]
    num_layers, num_shared = config.num_hidden_layers, config.num_kv_shared_layers
    if config.use_double_wide_mlp:
        first = num_layers - num_shared
        writer.add_feed_forward_length([config.intermediate_size * (1 if i < first else 2) for i in range(num_layers)])
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_head_count_kv([heads if each else 1 for each in windowed] if config.attention_k_eq_v else heads)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(windowed)
    writer.add_shared_kv_layers(num_shared)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input or 0)
    if config.final_logit_softcapping is not None:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(of_full)
    for add in (writer.add_key_length_swa, writer.add_value_length_swa, writer.add_rope_dimension_count_swa):
        add(head_dim)
    full, local = (config.rope_parameters[kind] for kind in ("full_attention", "sliding_attention"))
    writer.add_rope_freq_base(full["rope_theta"])
    writer.add_rope_freq_base_swa(local["rope_theta"])
    num_rotated = int(of_full * full["partial_rotary_factor"] / 2)
    divisors = [1.0] * num_rotated + [1e30] * (of_full // 2 - num_rotated)
    writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))


def _add_latent(writer: GGUFWriter, config: Any, joined: bool) -> None:  # Any: DeepseekV2Config or DeepseekV3Config
    size = config.qk_nope_head_dim + config.qk_rope_head_dim
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_vocab_size(config.vocab_size)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    if joined:
        writer.add_head_count_kv(config.num_attention_heads)
        writer.add_key_length(size)
        writer.add_value_length(config.v_head_dim)
    else:
        writer.add_head_count_kv(1)
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(size)
        writer.add_value_length_mla(config.v_head_dim)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    if isinstance(config, DeepseekV3Config):
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    rope = config.rope_parameters
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
