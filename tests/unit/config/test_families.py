"""What each family's file makes of config.json beyond what all families share, and what it refuses by name."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from inflight.config import families
from inflight.config.architecture import GELU_TANH, SILU, SWIGLU_OAI, ModelArchitecture, NormNames, TokenInputsSpec
from inflight.config.experts import MoeSpec, RouterSpec
from inflight.config.families import ENCODERS, FAMILIES, VISION_FAMILIES, transformers_vision
from inflight.config.families.family import Family
from inflight.config.families.gemma2 import scale_from_gguf
from inflight.config.mixers import HEAD, WHOLE, GatedDeltaSpec, LatentAttentionSpec, RopeConfig, ShortConvSpec
from inflight.config.parse_architecture import parse_architecture
from inflight.config.vision import TransformersVisionSpec
from inflight.config.whole_prompts import is_causal
from inflight.errors import UnsupportedModelError
from tests.support.encoders import ENCODER_CONFIGS
from tests.support.model_zoo import FAMILY_CONFIGS

BASE: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LONGROPE = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def parse(model_type: str, **fields: Any) -> ModelArchitecture:
    return parse_architecture({**BASE, "model_type": model_type, **fields})


def windows(model: ModelArchitecture) -> list[int | None]:
    return [layer.mixer.window for layer in model.layers]


def test_the_page_knows_each_family_and_its_lines() -> None:
    row = re.compile(
        r"^\| [^|]+\| `(\w+)`[^|]*\| \[(\d+)\]\(\.\./(inflight/config/families/\w+\.py)\) \|", re.MULTILINE
    )
    root = Path(__file__).parents[3]
    written = {name: (int(lines), file) for name, lines, file in row.findall((root / "docs/models.md").read_text())}
    files = {
        family.architecture: f"inflight/config/families/{module}.py"
        for modules, of_kind in (
            (families.NAMES, FAMILIES),
            (families.ENCODER_NAMES, ENCODERS),
            (families.VISION_NAMES, VISION_FAMILIES),
        )
        for module, family in zip(modules, of_kind, strict=True)
    }
    true = {name: (len((root / file).read_text().splitlines()), file) for name, file in files.items()}
    wrong = [f"`{name}`: [{true[name][0]}](../{true[name][1]})" for name in true if written.get(name) != true[name]]
    assert not wrong, f"docs/models.md, table of families: correct or add the lines of {'; '.join(wrong)}"
    assert written == true, f"docs/models.md, table of families: remove {written.keys() - true.keys()}"


def test_every_family_is_in_the_zoo() -> None:
    types = {family.model_type.removesuffix("_text") for family in FAMILIES}
    assert types == set(FAMILY_CONFIGS), (
        f"FAMILY_CONFIGS of tests/support/model_zoo.py lacks {types - set(FAMILY_CONFIGS)}, and has without a family "
        f"{set(FAMILY_CONFIGS) - types}"
    )


def test_every_encoder_is_in_its_zoo() -> None:
    assert {family.model_type for family in ENCODERS} == ENCODER_CONFIGS.keys() - {"gemma3"}


@pytest.mark.parametrize(
    ("model_type", "fields", "problem"),
    [
        ("bert", {"is_decoder": True}, "is_decoder=true is not supported"),
        (
            "bert",
            {"position_embedding_type": "relative_key"},
            "position_embedding_type='relative_key' is not supported",
        ),
        ("bert", {"hidden_act": "gelu_10"}, "hidden_act='gelu_10' is not supported; supported are silu"),
        ("roberta", {"max_position_embeddings": 2}, "leaves no position, because the first 2 are not used"),
        ("nomic_bert", {"is_decoder": True}, "is_decoder=true"),
    ],
)
def test_encoders_that_are_refused(model_type: str, fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(UnsupportedModelError, match=problem):
        parse(model_type, **fields)


def test_a_decoder_that_sees_both_directions_is_an_encoder() -> None:
    model = parse("qwen3", is_causal=False, head_dim=16)
    assert (is_causal(model), model.has_head, model.unread[-1]) == (False, False, "lm_head.")
    windowed = parse("gemma3_text", use_bidirectional_attention=True, sliding_window=9, num_hidden_layers=7)
    assert windows(windowed) == [5] * 5 + [None, 5]  # half of it on each side
    assert (is_causal(windowed), windowed.has_head) == (False, False)
    assert is_causal(parse("qwen3", is_causal=True, head_dim=16))


def test_gemma2() -> None:
    model = parse("gemma2", sliding_window=9, query_pre_attn_scalar=100, num_hidden_layers=3)
    attention = model.layers[0].mixer
    assert (attention.scale, attention.soft_cap, attention.head_dim, model.logits_cap) == (0.1, 50.0, 256, 30.0)
    assert windows(model) == [9, None, 9]
    assert (model.embedding_scale, model.norm_offset, model.tie_word_embeddings) == (8.0, 1.0, True)
    assert model.layers[0].mlp.activation == GELU_TANH
    assert None not in vars(model.layers[0].norms).values()
    assert parse("gemma2", final_logit_softcapping=None).logits_cap is None


def test_gemma3() -> None:
    model = parse("gemma3_text", sliding_window=9, num_hidden_layers=7, rope_local_base_freq=5000.0)
    assert windows(model) == [9] * 5 + [None, 9]
    ropes = [layer.mixer.rope for layer in model.layers[4:6]]
    assert [rope.theta for rope in ropes if rope is not None] == [5000.0, 1e6]
    assert model.layers[0].mixer.qk_norm == HEAD


def test_ministral3() -> None:
    rope = parse("ministral3", num_hidden_layers=1).attentions[0].rope
    assert rope is not None
    assert (rope.kind, rope.factor, rope.query_beta, rope.original_max_position_embeddings) == (
        "yarn",
        16.0,
        0.1,
        16384,
    )


def test_a_part_for_text_of_any_family() -> None:
    """In front of it is a tower that transformers' code computes."""
    text = {**BASE, "model_type": "ministral3"}
    config: dict[str, Any] = {"model_type": "mistral3", "text_config": text, "vision_config": {"hidden_size": 9}}
    model = parse_architecture(config)
    assert model.name == "Mistral3ForConditionalGeneration"
    assert isinstance(model.vision, TransformersVisionSpec) and model.vision.hidden_size == 9
    rope = model.attentions[0].rope
    assert rope is not None and rope.kind == "yarn"
    mistral = parse_architecture({**config, "text_config": {**text, "model_type": "mistral"}}).attentions[0].rope
    assert mistral is not None and mistral.kind != "yarn"
    with pytest.raises(UnsupportedModelError, match=r"model_type='cohere2' .*Mistral3ForConditional"):
        parse_architecture({**config, "text_config": {**text, "model_type": "cohere2"}})
    assert parse_architecture(config, language_model_only=True).vision is None


@pytest.mark.parametrize("model_type", transformers_vision.TEXT_DEFAULTS)
def test_sizes_that_a_part_for_text_may_leave_out_are_those_of_transformers(model_type: str) -> None:
    theirs = CONFIG_MAPPING[model_type]().to_dict()
    ours = transformers_vision.TEXT_DEFAULTS[model_type]
    assert ours == {name: theirs[name] for name in ours}
    text = {"model_type": model_type}
    parse_architecture({"model_type": "llava", "text_config": text, "vision_config": {}, "image_token_index": 9})


def test_lfm2() -> None:
    model = parse("lfm2", full_attn_idxs=[1], norm_eps=1e-3, num_hidden_layers=3)
    assert [layer.attention is not None for layer in model.layers] == [False, True, False]
    assert (model.rms_norm_eps, model.tie_word_embeddings, model.layers[0].mlp.size) == (1e-3, True, 256)
    assert parse("lfm2", full_attn_idxs=[1], block_auto_adjust_ff_dim=False).layers[0].mlp.size == 128
    assert model.layers[0].recurrence == ShortConvSpec(num_channels=64, kernel_size=3)


LATENT: dict[str, Any] = {
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 4,
}


def test_latent_attention() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    attention = parse("deepseek_v2", **LATENT, rope_scaling=scaling).attentions[0]
    assert isinstance(attention, LatentAttentionSpec)
    assert (attention.num_kv_heads, attention.head_dim) == (1, 36)
    sizes = attention.rank, attention.query_rank, attention.nope_dim, attention.rope_dim, attention.value_dim
    assert sizes == (32, None, 12, 4, 8)
    assert attention.scale == pytest.approx(0.25 * (0.1 * math.log(4) + 1) ** 2)
    assert attention.rope is not None
    assert (attention.rope.interleaved, attention.rope.attention_factor) == (True, 1.0)
    plain = parse("deepseek_v3", **LATENT, rope_interleave=False).attentions[0]
    assert plain.rope == RopeConfig()
    model = parse("minicpm3", **{**LATENT, "v_head_dim": None})
    assert isinstance(model.attentions[0], LatentAttentionSpec) and model.attentions[0].value_dim == 16
    assert (model.embedding_scale, model.logits_scale) == (pytest.approx(12 / 0.7), 4.0)


_COUNTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
_MOE_SIZES: dict[str, Any] = {**_COUNTS, "moe_intermediate_size": 32}
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {**_MOE_SIZES, "shared_expert_intermediate_size": 48},
    "qwen3_moe": _MOE_SIZES,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": _COUNTS,
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_next": {**_MOE_SIZES, "shared_expert_intermediate_size": 48},
    "qwen3_5_moe_text": {**_MOE_SIZES, "shared_expert_intermediate_size": 48},
    "lfm2_moe": {**_MOE_SIZES, "layer_types": ["conv", "full_attention"] * 6},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "granitemoehybrid": {
        "num_local_experts": 0,
        "layer_types": ["full_attention"] * 12,
        "shared_intermediate_size": 48,
    },
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
}


def sizes(family: Family) -> dict[str, Any]:
    """The sizes without which no model can be made: so many layers that each kind of layer is among them."""
    own: dict[str, Any] = {}
    if family.model_type in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu", "minicpm3"):
        own = {**LATENT, "num_key_value_heads": 4, "q_lora_rank": 16}
    if family.model_type in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite"):
        del own["first_k_dense_replace"]
        own |= {"n_routed_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    if family.model_type in EXPERTS:
        own = EXPERTS[family.model_type]
    return {**BASE, "num_hidden_layers": 12, "max_position_embeddings": 8192, **own}


@pytest.mark.parametrize("family", FAMILIES, ids=families.NAMES)
def test_what_is_absent_has_the_value_that_transformers_gives_it(family: Family) -> None:
    given = sizes(family)
    theirs = CONFIG_MAPPING[family.model_type](**given).to_dict()
    # the tokens that end a text are those of the checkpoint
    found = replace(parse(family.model_type, **given, eos_token_id=[9]), layers=())
    assert found == replace(parse_architecture({**theirs, "eos_token_id": [9]}), layers=())
    for mine, their in zip(parse(family.model_type, **given).layers, parse_architecture(theirs).layers, strict=True):
        assert mine == their, f"a default of {family.model_type} differs from the one of transformers' config class"


# What families call a field, if not as most do. A new family that differs from most needs its place in these lists.
ACTIVATIONS = dict.fromkeys(("gemma2", "gemma3_text", "gemma4_text"), "hidden_activation")
OWN_GATE = ("gpt_oss",)
RECURRENT = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "lfm2", "lfm2_moe")  # their recurrent layers have SiLU
NO_BIAS = (
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "phi3",
    "ministral",
    "ministral3",
    "lfm2",
    "lfm2_moe",
    "ernie4_5_moe",
)  # they have no field `attention_bias`
ONE_BIAS = ("glm", "glm4", "glm4_moe")  # on queries, keys and values only
MLP_BIAS = ("llama", "granite", "smollm3", "minicpm3", "deepseek_v2")


@pytest.mark.parametrize("family", FAMILIES, ids=families.NAMES)
def test_the_fields_that_families_share_go_to_their_places(family: Family) -> None:
    kind, given = family.model_type, sizes(family)
    eps = "norm_eps" if kind in ("lfm2", "lfm2_moe") else "rms_norm_eps"
    scale = parse(kind, **given, **{eps: 1.0}).rms_norm_eps  # some divide by the scale of the residual stream
    assert parse(kind, **given, **{eps: 0.25}).rms_norm_eps == pytest.approx(0.25 * scale)
    assert [parse(kind, **given, tie_word_embeddings=each).tie_word_embeddings for each in (True, False)] == [
        True,
        False,
    ]
    for activation in ("silu",) if kind in (*RECURRENT, *OWN_GATE) else ("silu", "gelu_pytorch_tanh"):
        model = parse(kind, **given, **{ACTIVATIONS.get(kind, "hidden_act"): activation})
        expected = SWIGLU_OAI if kind in OWN_GATE else SILU if activation == "silu" else GELU_TANH
        assert {layer.mlp.activation for layer in model.layers} == {expected}, (
            f"{kind}: is the activation called otherwise? Then ACTIVATIONS of this file has its name; has it recurrent layers? "
            "Then RECURRENT has it; is there no other activation? Then OWN_GATE has it"
        )
    if kind == "deepseek_v2":
        given["first_k_dense_replace"] = 12  # layers with experts have no biases
    model = parse(kind, **given, attention_bias=True, mlp_bias=True)
    has_bias = kind not in NO_BIAS
    has_own = kind in ("qwen2", "qwen2_moe")
    for attention in model.attentions:
        wanted = has_bias or has_own, has_bias and kind not in ONE_BIAS
        assert (attention.qkv_bias, attention.output_bias) == wanted, (
            f"{kind} with attention_bias=True: if the family has no such field, put it into NO_BIAS of this file; if the bias "
            "is on queries, keys and values only, into ONE_BIAS"
        )
    assert {getattr(layer.mlp, "bias", False) for layer in model.layers} == {kind in (*MLP_BIAS, *OWN_GATE)}, (
        f"{kind}: MLP_BIAS has families with mlp_bias"
    )
    plain = parse(kind, **given, attention_bias=False)
    assert {(each.qkv_bias, each.output_bias) for each in plain.attentions} == {(has_own, False)}
    if not isinstance(plain.attentions[0], LatentAttentionSpec):
        heads = {each.num_heads for each in plain.attentions}, {each.num_kv_heads for each in plain.attentions}
        assert heads == ({4}, {2})
        narrow = parse(kind, **given, head_dim=48)
        assert {each.head_dim for each in narrow.attentions} == ({48, 512} if kind == "gemma4_text" else {48})


@pytest.mark.parametrize("family", FAMILIES, ids=families.NAMES)
def test_a_field_of_another_family_is_refused(family: Family) -> None:
    """The value would change the result of models of the other family, so nobody can say what is meant here."""
    fields = {"clip_qkv": 8.0, "num_local_experts": 8, "alibi": True, "scale_depth": 1.4, "logit_scale": 0.1}
    for name, value in fields.items():
        if name in family.reads:
            continue
        with pytest.raises(UnsupportedModelError, match=f"{name}={value} is not supported for {family.architecture}"):
            parse(family.model_type, **sizes(family), **{name: value})


def test_layers_have_numbers_with_and_without_leading_zeros() -> None:
    """transformers writes all numbers of layers with equally many digits."""
    for zeros in ("", "0", "00"):
        own = {f"{zeros}0": {"head_dim": 32}, f"{zeros}5": {"num_key_value_heads": 1}, "10": {"head_dim": 48}}
        attentions = parse("gemma4_text", num_hidden_layers=12, head_dim=16, per_layer_config=own).attentions
        assert [each.head_dim for each in attentions] == [32] + [16] * 9 + [48, 16]
        assert [each.num_kv_heads for each in attentions] == [2] * 5 + [1] + [2] * 6


def test_gemma4_has_fewer_key_heads_only_where_values_are_keys() -> None:
    for is_equal, expected in ((True, 1), (False, 2)):
        model = parse("gemma4_text", num_hidden_layers=6, num_global_key_value_heads=1, attention_k_eq_v=is_equal)
        found = [(each.num_kv_heads, each.values_are_keys) for each in model.attentions]
        assert found == [(2, False)] * 5 + [(expected, is_equal)]


def test_the_projections_of_qwen3_next_are_grouped_by_key_heads() -> None:
    for name, is_grouped in (("qwen3_next", True), ("qwen3_5_text", False)):
        recurrences = parse(name, num_experts=0, linear_num_key_heads=2, linear_num_value_heads=6).recurrences
        assert (
            recurrences
            == [
                GatedDeltaSpec(
                    num_key_heads=2, num_value_heads=6, key_dim=128, value_dim=128, kernel_size=4, is_grouped=is_grouped
                )
            ]
            * 3
        )


def test_gemma4() -> None:
    own = {"num_kv_shared_layers": 4, "use_double_wide_mlp": True, "vocab_size_per_layer_input": 100000}
    model = parse("gemma4_text", sliding_window=9, num_hidden_layers=12, head_dim=16, **own)
    assert windows(model) == ([9] * 5 + [None]) * 2
    attentions = model.attentions
    assert [each.kv_layer for each in attentions] == [None] * 8 + [7, 7, 7, 5]
    assert len(model.caching) == 8
    assert model.head_dims == [16, 512]
    assert [layer.mlp.size for layer in model.layers[6:9]] == [128, 128, 256]
    full, local = attentions[5].rope, attentions[0].rope
    assert full is not None
    assert local is not None
    assert (full.kind, full.rotary_dim, full.theta, local.kind, local.rotary_dim) == (
        "proportional",
        128,
        1e6,
        "default",
        None,
    )
    assert model.token_inputs == TokenInputsSpec(vocab_size=100000, size=256, activation=GELU_TANH)
    assert "model.layers.8.self_attn.k_proj." in model.unread
    keys = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}
    model = parse("gemma4_text", **keys, num_hidden_layers=6)
    found = [(each.num_kv_heads, each.values_are_keys) for each in model.attentions[4:]]
    assert (found, model.token_inputs) == ([(2, False), (1, True)], None)


def test_olmo() -> None:
    for name in ("olmo2", "olmo3"):
        layer = parse(name, num_key_value_heads=None).layers[0]
        assert (layer.mixer.qk_norm, layer.mixer.num_kv_heads) == (WHOLE, 4)
        after = ("post_attention_layernorm", "post_feedforward_layernorm")
        assert layer.norms == NormNames(
            before_attention=None, after_attention=after[0], before_mlp=None, after_mlp=after[1]
        )
    assert windows(parse("olmo3", sliding_window=9)) == [9, 9, 9, None]


def test_phi3_and_the_length_up_to_which_its_short_factors_hold() -> None:
    model = parse("phi3", rope_scaling=LONGROPE, original_max_position_embeddings=128)
    assert model.default_max_model_len == 128
    for length, factor in ((128, 1.0), (129, 2.0)):
        rope = model.for_length(length).layers[0].mixer.rope
        assert rope is not None and rope.factors == (factor,) * 8


def test_granite_divides_the_residual_stream() -> None:
    model = parse("granite", embedding_multiplier=12.0, residual_multiplier=0.5, logits_scaling=4.0, rms_norm_eps=1e-6)
    assert (model.embedding_scale, model.stream_eps, model.logits_scale) == (24.0, 4e-6, 0.25)
    assert model.rms_norm_eps == 1e-6, "the eps of norms that do not read the residual stream"


def test_gpt_oss() -> None:
    rope = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
    given = {**EXPERTS["gpt_oss"], "head_dim": 64, "sliding_window": 128, "rope_theta": 150000, "rope_scaling": rope}
    model = parse("gpt_oss", **given)
    assert windows(model) == [128, None, 128, None]
    attention = model.attentions[0]
    assert (attention.has_sinks, attention.qkv_bias, attention.output_bias) == (True, True, True)
    assert attention.rope == RopeConfig(
        theta=150000.0,
        kind="yarn",
        factor=32.0,
        original_max_position_embeddings=4096,
        attention_factor=0.1 * math.log(32) + 1,
        truncate=False,
    )
    router = RouterSpec(top_k=2, renormalizes=True, bias=True)
    assert model.layers[0].mlp == MoeSpec(num_experts=4, size=128, router=router, activation=SWIGLU_OAI, bias=True)


def test_smollm3_leaves_the_rotary_embedding_out_of_every_fourth_layer() -> None:
    assert [layer.mixer.rope is None for layer in parse("smollm3").layers] == [False, False, False, True]


def test_smollm3_has_windows_only_if_it_uses_them() -> None:
    assert windows(parse("smollm3", sliding_window=8)) == [None] * 4
    assert windows(parse("smollm3", sliding_window=8, use_sliding_window=True)) == [None, None, None, 8]


def test_glm_rotates_half_of_each_head() -> None:
    for name in ("glm", "glm4"):
        rope = parse(name, head_dim=16).layers[0].mixer.rope
        assert rope is not None and (rope.rotary_dim, rope.interleaved) == (8, True)


def test_qwen3_5_has_attention_in_every_fourth_layer() -> None:
    rope = {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 2], "mrope_interleaved": True}
    model = parse("qwen3_5_text", num_hidden_layers=5, head_dim=32, rope_parameters=rope)
    assert [layer.attention is None for layer in model.layers] == [True, True, True, False, True]
    (attention,) = model.attentions
    assert (
        attention.rope == RopeConfig(theta=1e7, rotary_dim=8, mrope_section=(1, 1, 2), mrope_interleaved=True)
        and attention.has_gate
        and attention.qk_norm == HEAD
    )
    recurrence = GatedDeltaSpec(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, kernel_size=4)
    assert model.recurrences == [recurrence] * 4
    assert recurrence.num_features == 2 * (16 * 128 + 32 * 128 + 32) + 32 * 128
    assert recurrence.state_bytes(2, 2) == 4 * 16 * 128 * 128 + 3 * (2 * 8 * 128 + 16 * 128) * 2


@pytest.mark.parametrize(
    ("family", "fields", "words"),
    [
        ("qwen3_5_text", {"layer_types": ["linear_attention"] * 4}, "there must be a full_attention"),
        ("qwen3_5_text", {"layer_types": ["full_attention"] * 3}, "must have 4 entries, one per layer"),
        ("qwen3_5_text", {"linear_num_value_heads": 17}, "linear_num_value_heads=17 is not a multiple of"),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim=1 is not supported; at least 2 is"),
        ("qwen3_5_text", {"linear_key_head_dim": 0}, "linear_key_head_dim=0 is not a positive integer"),
        (
            "qwen3_5_text",
            {"hidden_act": "gelu_pytorch_tanh"},
            "hidden_act='gelu_pytorch_tanh' is not supported by Inflight",
        ),
        ("qwen3_next", {"num_experts": 0, "hidden_act": "gelu_new"}, "(--model-impl transformers)"),
        ("lfm2", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act='gelu_pytorch_tanh' is not supported by Inflight"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation='relu' is not supported; supported are silu"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0 is not a positive number"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("deepseek_v2", {**LATENT, "attention_bias": True}, "attention_bias without q_lora_rank is not supported"),
        ("youtu", {**LATENT, "qk_rope_head_dim": 5}, "qk_rope_head_dim=5 is odd"),
        ("lfm2_moe", EXPERTS["qwen3_moe"], "layer_types is missing"),
        (
            "lfm2_moe",
            {**EXPERTS["lfm2_moe"], "num_hidden_layers": 12, "num_dense_layers": None},
            "num_dense_layers=null",
        ),
        ("qwen3_5_moe_text", EXPERTS["qwen3_moe"], "shared_expert_intermediate_size is missing"),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache=1 is not supported; at least 2 is"),
        ("lfm2", {"full_attn_idxs": []}, "there must be a full_attention"),
        ("gemma4_text", {"enable_moe_block": True}, "num_experts is missing"),
        ("gemma4_text", {"enable_moe_block": True, **_MOE_SIZES}, "top_k_experts is missing"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' is not supported"),
        ("gemma4_text", {"num_kv_shared_layers": 4}, "leaves no layer of each kind in layer_types"),
        ("gemma4_text", {"num_kv_shared_layers": -1}, "num_kv_shared_layers=-1 is not an integer of at least 0"),
        ("gemma4_text", {"per_layer_config": {"0": {"sinks": 1}}}, "per_layer_config: 0: sinks is not supported"),
        ("gemma4_text", {"vocab_size": 300000}, "vocab_size_per_layer_input=262144 is less than vocab_size=300000"),
        ("gemma3_text", {"layer_types": ["sliding_attention"]}, "must have 4 entries, one per layer"),
        ("gemma3_text", {"layer_types": ["chunked_attention"] * 4}, "must be full_attention or sliding_attention"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "rope_type is not supported; for this family"),
        ("phi3", {"rope_scaling": {**LONGROPE, "short_factor": [1.0] * 7}}, "must have 8 numbers, one for each pair"),
        ("phi3", {"rope_scaling": {**LONGROPE, "short_factor": [0.0] * 8}}, "is not a list of positive numbers"),
        ("phi3", {"partial_rotary_factor": 0.2}, "partial_rotary_factor=0.2 is not supported"),
        ("glm", {"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5 is not supported"),
        (
            "granitemoehybrid",
            {"num_local_experts": 8, "layer_types": ["attention"] * 4},
            "num_local_experts=8 is not supported",
        ),
        ("granitemoehybrid", {"layer_types": ["attention", "mamba"] * 2}, "'mamba'] is not supported; 4 entries"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier=0 is not a positive number"),
        ("granite", {"logits_scaling": "8"}, "logits_scaling='8' is not a positive number"),
        ("smollm3", {"no_rope_layers": [0, 2, 1, 1]}, "is not 0 or 1 for each of 4 layers"),
        ("smollm3", {"no_rope_layers": [0]}, "is not 0 or 1 for each of 4 layers"),
        ("gpt_oss", {**EXPERTS["gpt_oss"], "swiglu_limit": 5.0}, "swiglu_limit=5.0 is not supported; 7.0 is"),
        ("gpt_oss", {**EXPERTS["gpt_oss"], "swiglu_alpha": 1}, "swiglu_alpha=1 is not supported; 1.702 is"),
        (
            "gpt_oss",
            {**EXPERTS["gpt_oss"], "hidden_act": "gelu_new"},
            "hidden_act='gelu_new' is not supported for GptOss",
        ),
        ("ministral", {"residual_multiplier": 0.2}, "residual_multiplier=0.2 is not supported for Ministral"),
    ],
)
def test_a_refusal_names_the_field(family: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        parse(family, **fields)
    assert words in str(caught.value)


def test_the_smallest_sizes_are_read() -> None:
    """Those beside the refused ones."""
    assert parse("qwen3_5_text", linear_conv_kernel_dim=2).recurrences[0].kernel_size == 2
    assert parse("lfm2", conv_L_cache=2, full_attn_idxs=[1]).recurrences[0].kernel_size == 2
    assert parse("qwen3_5_text", linear_num_value_heads=16).recurrences[0].num_value_heads == 16
    parse("gemma4_text", vocab_size=262144)
    parse("gemma4_text", num_kv_shared_layers=0)
    parse("smollm3", no_rope_layers=[0, 1, 1, 1])


def test_weights_of_norms_and_their_places() -> None:
    """Gemma 2 and 3 and Qwen3.5 store the weight of a norm minus 1. Gemma 4 does not."""
    offsets = {family.model_type: parse(family.model_type, **sizes(family)).norm_offset for family in FAMILIES}
    assert {name for name, offset in offsets.items() if offset == 1.0} == {
        "gemma2",
        "gemma3_text",
        "qwen3_5_text",
        "qwen3_5_moe_text",
        "qwen3_next",
    }
    assert {*offsets.values()} == {0.0, 1.0}
    after = NormNames(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")
    assert [parse(name).layers[0].norms for name in ("glm", "glm4")] == [NormNames(), after]


def test_phi3_without_a_length_before_scaling_has_the_one_of_its_first_release() -> None:
    model = parse("phi3", rope_scaling=LONGROPE, max_position_embeddings=131072)
    assert model.default_max_model_len == 4096


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({}, 768),  # 2/3 of 1024 is 682, and the next multiple of 256 is 768
        ({"block_auto_adjust_ff_dim": False}, 1024),
        ({"block_ffn_dim_multiplier": None}, 682),
        ({"block_ffn_dim_multiplier": 1.5}, 1024),
        ({"block_multiple_of": 10}, 690),
    ],
)
def test_the_adjusted_sizes_of_lfm2(fields: dict[str, Any], size: int) -> None:
    given = {
        "block_ff_dim": 1024,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
    }
    config = {**FAMILY_CONFIGS["lfm2"][0].to_dict(), **given, **fields}
    assert {layer.mlp.size for layer in parse_architecture(config).layers} == {size}


def test_the_scale_of_gemma2_from_a_gguf_file() -> None:
    given = {"embedding_length": 4608, "attention.head_count": 32, "block_count": 46, "attention.key_length": 128}
    assert scale_from_gguf(given, 46) == {"query_pre_attn_scalar": 144}
    assert scale_from_gguf(given, 26) == {"query_pre_attn_scalar": 128}
    for name, value in (("embedding_length", "4608"), ("attention.head_count", 0), ("attention.head_count", [8, 8])):
        assert scale_from_gguf({**given, name: value}, 46) == {"query_pre_attn_scalar": 128}


def test_smollm3_chooses_the_layers_that_rotate() -> None:
    def rotates(**fields: Any) -> list[bool]:
        return [each.rope is not None for each in parse("smollm3", **fields).attentions]

    assert rotates(no_rope_layers=[1, 0, 0, 1, 0]) == [True, False, False, True]
    assert rotates(no_rope_layer_interval=2) == [True, False, True, False]
    model = parse("smollm3", no_rope_layers=[1, 0, 0, 1], sliding_window=8, use_sliding_window=True)
    assert windows(model) == [None, 8, 8, None]
