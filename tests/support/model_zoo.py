"""Small models of every family, odd ones too, written by transformers: what the engine's results are compared with.

    folder = write_model(FAMILY_CONFIGS["qwen3"][0], tmp_path / "model", seed=0)

Weights are wide (0.15 where models start with 0.02), norms and biases are random too: logits are far apart, and a norm
or a bias that was left out shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    FalconH1Config,
    FalconMambaConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    HunYuanMoEV1Config,
    Lfm2Config,
    Lfm2MoeConfig,
    LlamaConfig,
    MiniCPM3Config,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    OlmoHybridConfig,
    Phi3Config,
    PhimoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SmolLM3Config,
    YoutuConfig,
)

VOCAB_SIZE = 203
_STANDARD_DEVIATION = 0.15
_SCALES = ("router.scale", "per_expert_scale")
_CHOICE_BIASES = ("e_score_correction_bias", "expert_bias")  # buffers, in some families

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_GRANITE_4: dict[str, Any] = {
    **_COMMON,
    "shared_intermediate_size": 112,
    "num_local_experts": 0,
    "layer_types": ["full_attention"] * 2,
    "mamba_n_heads": 4,
}
_LATENT: dict[str, Any] = {
    **_COMMON,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 40,
}
_EXPERTS = {**_COMMON, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_GATED_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
# DeepSeek's: two of three layers have experts
_ROUTED: dict[str, Any] = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
}
_ERNIE: dict[str, Any] = {**_COMMON, "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 32}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_MSCALE_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
_MSCALE_ROPE |= {"mscale": 0.7, "mscale_all_dim": 1.2}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}
_YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}


_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
}
_SLIDING_EVERY_OTHER = ["sliding_attention", "full_attention"]


def _gemma3(**fields: Any) -> Gemma3TextConfig:
    return Gemma3TextConfig(**{**_COMMON, "head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 11, **fields})


def _gemma4(**fields: Any) -> Gemma4TextConfig:
    own = {"head_dim": 16, "global_head_dim": 32, "sliding_window": 9, "layer_types": _SLIDING_EVERY_OTHER * 2}
    sizes = {"num_hidden_layers": 4, "vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 0}
    return Gemma4TextConfig(**{**_COMMON, **own, **sizes, **fields})


def _hybrid(kind: type[PreTrainedConfig], **fields: Any) -> PreTrainedConfig:
    heads = {
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 32,
    }
    return kind(**{**_COMMON, "num_hidden_layers": 4, "head_dim": 32, **heads, **fields})


def _qwen3_5(**fields: Any) -> PreTrainedConfig:
    return _hybrid(Qwen3_5TextConfig, **fields)


def _lfm2(**fields: Any) -> Lfm2Config:
    return Lfm2Config(**{**_COMMON, "num_hidden_layers": 3, "block_multiple_of": 16, **fields})


def _lfm2_moe(**fields: Any) -> Lfm2MoeConfig:
    return Lfm2MoeConfig(
        **{**_EXPERTS, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], **fields}
    )


def _llama(**fields: Any) -> LlamaConfig:
    return LlamaConfig(**{**_COMMON, **fields})


def _mistral(**fields: Any) -> MistralConfig:
    return MistralConfig(**{**_COMMON, "sliding_window": None, **fields})


def _qwen2(**fields: Any) -> Qwen2Config:
    return Qwen2Config(**{**_COMMON, **fields})


def _qwen3(**fields: Any) -> Qwen3Config:
    return Qwen3Config(**{**_COMMON, "head_dim": 16, **fields})


def _qwen3_moe(**fields: Any) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(**{**_EXPERTS, "head_dim": 16, **fields})


def _gpt_oss(**fields: Any) -> GptOssConfig:
    own = {"head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 11}
    return GptOssConfig(**{**_COMMON, **own, **fields})


# The first of each family is the plain one; the others are the ways in which real checkpoints differ from it.
FAMILY_CONFIGS: dict[str, list[PreTrainedConfig]] = {
    "llama": [
        _llama(),
        _llama(num_attention_heads=8, num_key_value_heads=1, head_dim=20),  # MQA; heads * head_dim is not hidden_size
        _llama(num_attention_heads=8, num_key_value_heads=8, hidden_size=80, tie_word_embeddings=True),
        _llama(rope_parameters=_LLAMA3_ROPE, num_hidden_layers=3),
        _llama(rope_parameters=_LINEAR_ROPE, head_dim=24, tie_word_embeddings=True),
        _llama(rope_parameters=_YARN_ROPE, head_dim=40, num_key_value_heads=1),
        _llama(attention_bias=True, mlp_bias=True, rms_norm_eps=1e-5),
        _llama(head_dim=80, num_attention_heads=3, num_key_value_heads=3, hidden_size=60, intermediate_size=33),
    ],
    "mistral": [
        _mistral(),
        _mistral(sliding_window=7),
        _mistral(sliding_window=1, num_key_value_heads=4),  # every token sees itself alone
        _mistral(sliding_window=16, head_dim=20, num_attention_heads=5, num_key_value_heads=5, hidden_size=60),
        _mistral(sliding_window=33, num_key_value_heads=1, tie_word_embeddings=True),
        _mistral(head_dim=40, rope_parameters=_YARN_ROPE),
        _mistral(head_dim=24, num_attention_heads=6, num_key_value_heads=3, rms_norm_eps=1e-5),
    ],
    "qwen2": [
        _qwen2(),
        _qwen2(tie_word_embeddings=True, num_key_value_heads=1),
        _qwen2(use_sliding_window=True, sliding_window=9, max_window_layers=1, num_hidden_layers=3),
        _qwen2(
            use_sliding_window=True,
            sliding_window=5,
            num_hidden_layers=4,
            layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        ),
        _qwen2(num_attention_heads=7, num_key_value_heads=7, hidden_size=140, tie_word_embeddings=True),
        _qwen2(rope_parameters=_YARN_ROPE, num_attention_heads=2, num_key_value_heads=2, hidden_size=80),
        _qwen2(rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}, sliding_window=4),  # not in use
    ],
    "qwen3": [
        _qwen3(),
        _qwen3(tie_word_embeddings=True, head_dim=32, num_key_value_heads=1),
        _qwen3(attention_bias=True, head_dim=20),
        _qwen3(use_sliding_window=True, sliding_window=6, max_window_layers=2, num_hidden_layers=3),
        _qwen3(
            use_sliding_window=True,
            sliding_window=11,
            num_hidden_layers=3,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            tie_word_embeddings=True,
        ),
        _qwen3(head_dim=24, num_attention_heads=9, num_key_value_heads=3, rms_norm_eps=1e-5),
        _qwen3(rope_parameters=_YARN_ROPE, head_dim=40, num_attention_heads=2, num_key_value_heads=2),
        _qwen3(head_dim=80, hidden_size=48, num_hidden_layers=4, rope_parameters=_LINEAR_ROPE),
    ],
    "qwen3_5": [
        _qwen3_5(),
        _qwen3_5(tie_word_embeddings=True, linear_num_value_heads=2, linear_conv_kernel_dim=2, num_key_value_heads=1),
        # not for the kernel
        _qwen3_5(linear_value_head_dim=16, layer_types=["linear_attention", "full_attention"] * 2),
    ],
    "qwen3_next": [
        _hybrid(Qwen3NextConfig, num_experts=0),
        _hybrid(Qwen3NextConfig, num_experts=0, linear_num_key_heads=4, tie_word_embeddings=True),
        _hybrid(Qwen3NextConfig, **_GATED_EXPERTS, mlp_only_layers=[1]),
        _hybrid(Qwen3NextConfig, **_GATED_EXPERTS, norm_topk_prob=False, decoder_sparse_step=2),
    ],
    "qwen3_5_moe": [
        _hybrid(Qwen3_5MoeTextConfig, **_GATED_EXPERTS),
        _hybrid(
            Qwen3_5MoeTextConfig,
            **{**_GATED_EXPERTS, "num_experts_per_tok": 1, "shared_expert_intermediate_size": 96},
            linear_num_value_heads=2,
            layer_types=["full_attention", "linear_attention"] * 2,
        ),
    ],
    "lfm2": [
        _lfm2(layer_types=["conv", "full_attention", "conv"]),
        _lfm2(
            conv_bias=True,
            conv_L_cache=4,
            full_attn_idxs=[2],
            tie_word_embeddings=False,
            hidden_size=96,
            num_attention_heads=6,
        ),
        # not for the kernel
        _lfm2(full_attn_idxs=[0], hidden_size=72, num_attention_heads=6, block_auto_adjust_ff_dim=False),
    ],
    "lfm2_moe": [
        _lfm2_moe(num_dense_layers=1, routed_scaling_factor=1.5),
        _lfm2_moe(num_dense_layers=0, use_expert_bias=False, conv_bias=True),
        _lfm2_moe(num_dense_layers=2, norm_topk_prob=False, tie_word_embeddings=False, num_hidden_layers=3),
    ],
    "ministral3": [
        # queries beyond 16 tokens are scaled
        Ministral3Config(
            **_COMMON,
            head_dim=16,
            rope_parameters={**_YARN_ROPE, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5},
        ),
        Ministral3Config(**_COMMON, head_dim=40, sliding_window=9),
    ],
    "gemma2": [
        Gemma2Config(**_COMMON, head_dim=16, sliding_window=9, query_pre_attn_scalar=11),
        Gemma2Config(
            **_COMMON, head_dim=32, sliding_window=4096, attn_logit_softcapping=3.0, final_logit_softcapping=None
        ),
    ],
    "gemma3": [
        _gemma3(layer_types=_SLIDING_EVERY_OTHER),  # two rotary embeddings
        _gemma3(num_hidden_layers=7, head_dim=32),
        _gemma3(
            layer_types=_SLIDING_EVERY_OTHER,
            tie_word_embeddings=False,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        ),
    ],
    "gemma4": [
        # the last layers read earlier ones' keys and values; each layer gets vectors that depend on the tokens
        _gemma4(
            layer_types=_SLIDING_EVERY_OTHER * 3,
            num_hidden_layers=6,
            num_kv_shared_layers=2,
            use_double_wide_mlp=True,
            hidden_size_per_layer_input=16,
            final_logit_softcapping=2.0,
        ),
        _gemma4(attention_k_eq_v=True, num_global_key_value_heads=1),  # values are keys
        _gemma4(tie_word_embeddings=False, num_hidden_layers=7, layer_types=None, head_dim=48),
        # experts beside the MLP
        _gemma4(enable_moe_block=True, num_experts=8, top_k_experts=3, moe_intermediate_size=32),
    ],
    "phi3": [
        Phi3Config(**_COMMON),  # fused projections
        # transformers changes to the long factors in a sequence of more than 1024 tokens, Inflight with a longer max_model_len
        Phi3Config(**_COMMON, rope_parameters=_LONGROPE, original_max_position_embeddings=1024),
        Phi3Config(**_COMMON, partial_rotary_factor=0.75, sliding_window=9),
    ],
    "olmo2": [Olmo2Config(**_COMMON), Olmo2Config(**{**_COMMON, "num_key_value_heads": 4}, attention_bias=True)],
    "olmo3": [
        Olmo3Config(**_COMMON, layer_types=_SLIDING_EVERY_OTHER, sliding_window=9),
        Olmo3Config(
            **{**_COMMON, "num_hidden_layers": 5},
            sliding_window=5,
            rope_parameters={
                "full_attention": _YARN_ROPE,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        ),
    ],
    "granite": [
        GraniteConfig(**_COMMON, attention_multiplier=0.2, logits_scaling=2.0),
        GraniteConfig(
            **_COMMON, embedding_multiplier=12.0, residual_multiplier=0.22, attention_bias=True, mlp_bias=True
        ),
    ],
    "smollm3": [
        SmolLM3Config(**{**_COMMON, "num_hidden_layers": 4}),
        SmolLM3Config(**_COMMON, no_rope_layers=[0, 1], use_sliding_window=True, sliding_window=9),
    ],
    "glm": [GlmConfig(**_COMMON, head_dim=16), GlmConfig(**_COMMON, head_dim=32, attention_bias=False)],
    "glm4": [Glm4Config(**_COMMON, head_dim=16), Glm4Config(**_COMMON, head_dim=32, attention_bias=True)],
    "ministral": [MinistralConfig(**_COMMON, head_dim=16, sliding_window=9, layer_types=_SLIDING_EVERY_OTHER)],
    "deepseek_v2": [
        DeepseekV2Config(**_LATENT, q_lora_rank=None, first_k_dense_replace=9),
        DeepseekV2Config(
            **_LATENT, q_lora_rank=24, first_k_dense_replace=9, attention_bias=True, rope_parameters=_MSCALE_ROPE
        ),
        # not for the kernel
        DeepseekV2Config(
            **{**_LATENT, "kv_lora_rank": 20, "qk_nope_head_dim": 6}, q_lora_rank=None, first_k_dense_replace=9
        ),
        DeepseekV2Config(
            **{**_LATENT, **_ROUTED, "n_shared_experts": 2},
            q_lora_rank=None,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
        ),
        DeepseekV2Config(**{**_LATENT, **_ROUTED, "first_k_dense_replace": 0}, q_lora_rank=24),
    ],
    "deepseek_v3": [
        DeepseekV3Config(**_LATENT, q_lora_rank=24, first_k_dense_replace=9, rope_parameters=_MSCALE_ROPE),
        DeepseekV3Config(**_LATENT, q_lora_rank=None, first_k_dense_replace=9, rope_interleave=False),
        DeepseekV3Config(**{**_LATENT, **_ROUTED}, q_lora_rank=24, n_group=4, topk_group=2),
        DeepseekV3Config(
            **{**_LATENT, **_ROUTED, "n_shared_experts": 2, "first_k_dense_replace": 0},
            q_lora_rank=None,
            n_group=1,
            topk_group=1,
            norm_topk_prob=False,
            routed_scaling_factor=0.75,
        ),
    ],
    "glm4_moe_lite": [
        Glm4MoeLiteConfig(**{**_LATENT, **_ROUTED}, q_lora_rank=24),
        Glm4MoeLiteConfig(
            **{**_LATENT, **_ROUTED, "first_k_dense_replace": 0},
            q_lora_rank=None,
            mlp_layer_types=["sparse"] * 3,
            rope_interleave=False,
        ),
    ],
    "glm4_moe": [
        Glm4MoeConfig(**{**_COMMON, **_ROUTED}, head_dim=16, use_qk_norm=True, routed_scaling_factor=2.0),
        Glm4MoeConfig(
            **{**_COMMON, **_ROUTED, "first_k_dense_replace": 2},
            head_dim=32,
            attention_bias=True,
            n_group=2,
            topk_group=1,
            norm_topk_prob=False,
        ),
    ],
    "youtu": [YoutuConfig(**_LATENT, q_lora_rank=24)],
    "qwen3_moe": [
        _qwen3_moe(norm_topk_prob=True),
        _qwen3_moe(
            num_experts=7, num_experts_per_tok=7, attention_bias=True, tie_word_embeddings=True
        ),  # all are chosen
        _qwen3_moe(num_hidden_layers=4, mlp_only_layers=[1], decoder_sparse_step=2, moe_intermediate_size=40),
        _qwen3_moe(use_sliding_window=True, sliding_window=9, num_experts_per_tok=1, norm_topk_prob=True),
        # not for the kernel
        _qwen3_moe(hidden_size=72, moe_intermediate_size=38, head_dim=20),
    ],
    "qwen2_moe": [
        Qwen2MoeConfig(**_EXPERTS, shared_expert_intermediate_size=48),
        Qwen2MoeConfig(
            **{**_EXPERTS, "num_hidden_layers": 3},
            shared_expert_intermediate_size=96,
            use_sliding_window=True,
            sliding_window=9,
            max_window_layers=2,
            mlp_only_layers=[0],
            norm_topk_prob=True,
            qkv_bias=False,
        ),
    ],
    "mixtral": [
        MixtralConfig(**_COMMON, num_local_experts=4, sliding_window=None),
        MixtralConfig(**_COMMON, num_local_experts=8, num_experts_per_tok=3, sliding_window=9, head_dim=20),
    ],
    "olmoe": [
        OlmoeConfig(**{**_COMMON, "intermediate_size": 48}, num_experts=8, num_experts_per_tok=2),
        OlmoeConfig(**_COMMON, num_experts=4, num_experts_per_tok=3, norm_topk_prob=True, attention_bias=True),
    ],
    "granitemoehybrid": [
        GraniteMoeHybridConfig(
            **_GRANITE_4, attention_multiplier=0.2, logits_scaling=2.0, position_embedding_type="rope"
        ),
        GraniteMoeHybridConfig(
            **_GRANITE_4,
            attention_bias=True,
            residual_multiplier=0.5,
            embedding_multiplier=3.0,
            tie_word_embeddings=True,
        ),
    ],
    "granitemoe": [
        GraniteMoeConfig(**_COMMON, num_local_experts=6, attention_multiplier=0.2, logits_scaling=2.0),
        GraniteMoeConfig(
            **_COMMON, num_local_experts=4, num_experts_per_tok=1, embedding_multiplier=12.0, residual_multiplier=0.22
        ),
    ],
    "gpt_oss": [
        # sinks, biases, alternating windows, a clamped gate; yarn whose range is not rounded
        _gpt_oss(rope_parameters={**_YARN_ROPE, "truncate": False}),
        _gpt_oss(num_hidden_layers=3, num_local_experts=7, num_experts_per_tok=1, attention_bias=False, head_dim=32),
        # the windows are elsewhere; not for the kernel
        _gpt_oss(
            layer_types=["full_attention", "sliding_attention"], hidden_size=72, intermediate_size=38, head_dim=20
        ),
    ],
    "ernie4_5_moe": [
        Ernie4_5_MoeConfig(**{**_ERNIE, "moe_layer_start_index": 0}),
        Ernie4_5_MoeConfig(
            **{**_ERNIE, "num_hidden_layers": 6, "moe_num_shared_experts": 0},
            moe_layer_end_index=4,
            moe_layer_interval=2,
            tie_word_embeddings=False,
            head_dim=32,
        ),
    ],
    "hunyuan_v1_moe": [
        HunYuanMoEV1Config(**_COMMON, head_dim=16, num_experts=6, moe_topk=2),
        HunYuanMoEV1Config(
            **{**_COMMON, "intermediate_size": 32},
            head_dim=32,
            num_experts=8,
            moe_topk=3,
            attention_bias=True,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 100.0},
        ),
    ],
    "phimoe": [
        # experts whose logits are near to the highest share its weight
        PhimoeConfig(**_COMMON, num_local_experts=6, router_jitter_noise=0.3, attention_bias=True, lm_head_bias=True),
        PhimoeConfig(
            **{**_COMMON, "intermediate_size": 32},
            num_local_experts=8,
            rope_parameters={
                **_LONGROPE,
                "short_mscale": 1.25,
                "long_mscale": 1.25,
                "original_max_position_embeddings": 1024,
            },
        ),
    ],
    "minicpm3": [
        MiniCPM3Config(**{**_LATENT, "v_head_dim": None}, q_lora_rank=24),
        MiniCPM3Config(**_LATENT, q_lora_rank=24, scale_depth=None, dim_model_base=None, scale_emb=1),
    ],
}

# Models for the fallback. Inflight computes the first families itself, unless model_impl is "transformers".
FALLBACK_CONFIGS: dict[str, list[PreTrainedConfig]] = {
    **{name: FAMILY_CONFIGS[name][:1] for name in ("gemma2", "phi3", "olmo2", "granite", "mixtral")},
    "qwen3_moe": [Qwen3MoeConfig(**_COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)],
    "gpt2": [GPT2Config(vocab_size=VOCAB_SIZE, n_embd=64, n_layer=2, n_head=4, n_positions=1024)],  # learned positions
    "dots1": [Dots1Config(**{**_COMMON, **_ROUTED, "num_hidden_layers": 2, "n_routed_experts": 4})],
    "gpt_oss": [
        GptOssConfig(**_COMMON, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=11)
    ],  # sinks
    "falcon_mamba": [
        FalconMambaConfig(
            vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=2, state_size=8, time_step_rank=8, eos_token_id=2
        )
    ],  # a state, and no attention
    "falcon_h1": [  # attention and a recurrent layer side by side
        FalconH1Config(**_COMMON, mamba_d_ssm=128, mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16)
    ],
    "olmo_hybrid": [
        OlmoHybridConfig(
            **_COMMON,
            layer_types=["linear_attention", "full_attention"],
            **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
            **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
        )
    ],
}


def write_model(
    config: PreTrainedConfig,
    folder: Path,
    seed: int,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
) -> Path:
    """Draws the model and saves it in `folder`, which is created and returned. A small shard size makes several files."""
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    draw_weights(model, seed)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def draw_weights(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        is_norm = "norm" in name or name.endswith(_SCALES)
        values = torch.randn(parameter.shape, generator=generator) * _STANDARD_DEVIATION
        parameter.data.copy_(1 + values if is_norm else values)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.copy_(1 + torch.randn(1, generator=generator) * _STANDARD_DEVIATION)
        if name.endswith(_CHOICE_BIASES):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * _STANDARD_DEVIATION)


def reference_model(folder: Path, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The truth: transformers, eager attention, and experts one by one."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    if model.get_experts_implementation():
        model.set_experts_implementation("eager")
    assert isinstance(model, PreTrainedModel)
    return model.eval()
