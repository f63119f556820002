"""`MoeSpec`: how it is divided, what it costs, and what config.json must say of experts."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from inflight.config.architecture import GELU_TANH, INFLIGHT, SIGMOID, TRANSFORMERS, ModelArchitecture
from inflight.config.experts import HIGHEST, SPARSE_MIXER, TWO_HIGHEST, MoeSpec, RouterSpec, share_read
from inflight.config.parse_architecture import parse_architecture
from inflight.config.unknown_family import describe_model
from inflight.errors import ImpossibleFieldError, UnsupportedModelError
from tests.support.model_zoo import FAMILY_CONFIGS

SPEC = MoeSpec(num_experts=8, size=12, router=RouterSpec(top_k=2), shared_size=20)


def test_a_token_is_multiplied_by_its_own_experts() -> None:
    assert SPEC.num_features == 3 * (2 * 12 + 20) + 8


def test_a_step_reads_the_experts_of_its_tokens() -> None:
    assert SPEC.num_features_read(1) == pytest.approx(SPEC.num_features)
    assert SPEC.num_features_read(2) == pytest.approx(3 * ((2 + 2 * 6 / 8) * 12 + 20) + 8)
    assert SPEC.num_features_read(1000) == pytest.approx(3 * (8 * 12 + 20) + 8)


def test_of_a_model_with_experts_a_larger_step_reads_more() -> None:
    assert share_read(parse_architecture({**FAMILY_CONFIGS["llama"][0].to_dict(), "architectures": None})) is None
    share = share_read(parse_architecture({**FAMILY_CONFIGS["qwen3_moe"][0].to_dict(), "architectures": None}))
    assert share is not None
    found = [share(num_tokens) for num_tokens in (1, 2, 8, 1000)]
    assert found == sorted(set(found)) and found[0] > 0 and found[-1] == pytest.approx(1)


def test_experts_are_divided_by_their_width() -> None:
    assert [size for size in range(1, 13) if SPEC.fits(size)] == [1, 2, 4]
    assert str(SPEC) == "experts of size 12 and a shared one of size 20"


def specs(name: str, config: int = 0, **fields: Any) -> list[Any]:  # Any: of each layer its MLP
    given = {**FAMILY_CONFIGS[name][config].to_dict(), "architectures": None, **fields}
    return [layer.mlp for layer in parse_architecture(given).layers]


def test_qwen3_moe() -> None:
    (spec, *_) = specs("qwen3_moe")
    assert spec == MoeSpec(num_experts=8, size=32, router=RouterSpec(top_k=3, renormalizes=True))
    assert not specs("qwen3_moe", norm_topk_prob=None)[0].router.renormalizes
    assert specs("qwen3_moe", hidden_act="gelu_new")[0].activation == GELU_TANH
    found = specs("qwen3_moe", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert [each.kind for each in found] == ["gated", "moe", "gated", "gated", "gated", "moe"]


def test_other_families() -> None:
    assert specs("mixtral")[0] == MoeSpec(num_experts=4, size=112, router=RouterSpec(top_k=2, renormalizes=True))
    assert specs("granitemoe")[0].router.renormalizes
    assert not specs("olmoe")[0].router.renormalizes
    assert (specs("qwen2_moe")[0].shared_size, specs("qwen2_moe")[0].has_shared_gate) == (48, True)


def test_deepseek_and_glm() -> None:
    dense, spec, _ = specs("deepseek_v3", config=2)
    assert dense.kind == "gated"
    router = RouterSpec(top_k=3, renormalizes=True, scale=2.5, has_choice_bias=True, scoring=SIGMOID)
    router = replace(router, num_groups=4, top_groups=2, group_scoring=TWO_HIGHEST)
    assert spec == MoeSpec(num_experts=8, size=32, router=router, shared_size=32)
    spec = specs("deepseek_v2", config=3)[1]
    assert spec.router == RouterSpec(top_k=3, scale=2.5, num_groups=4, top_groups=2, group_scoring=HIGHEST)
    assert spec.shared_size == 64
    assert specs("deepseek_v2", config=3, topk_method="greedy")[1].router.num_groups == 1
    assert not specs("deepseek_v3", config=2, norm_topk_prob=None)[1].router.renormalizes
    assert [each.kind for each in specs("glm4_moe", first_k_dense_replace=0)] == ["moe"] * 3
    spec = specs("lfm2_moe")[1]
    assert (spec.router.has_choice_bias, spec.router.sum_offset, spec.router.scale) == (True, 1e-6, 1.5)
    assert (specs("qwen3_next", config=2)[0].shared_size, specs("qwen3_next", config=2)[1].kind) == (48, "gated")
    assert specs("qwen3_5_moe")[0].router.renormalizes and not specs("qwen3_next", config=3)[1].router.renormalizes
    router = RouterSpec(top_k=2, scoring=SPARSE_MIXER, jitter=0.3)
    assert specs("phimoe")[0] == MoeSpec(num_experts=6, size=112, router=router)
    spec = specs("hunyuan_v1_moe", num_experts=[6, 6], moe_topk=[2, 2], num_shared_expert=[1, 1], use_cla=False)[0]
    assert spec == MoeSpec(num_experts=6, size=112, router=RouterSpec(top_k=2, renormalizes=True), shared_size=112)
    both = specs("gemma4", 3)[0]
    assert (both.dense.size, both.dense.activation, both.moe.activation) == (112, GELU_TANH, GELU_TANH)
    assert both.moe.router == RouterSpec(top_k=3, renormalizes=True, has_expert_scale=True)
    assert (both.moe.num_experts, both.moe.size, both.num_features) == (8, 32, 3 * (112 + 3 * 32) + 8)
    assert both.num_features_read(1000) == pytest.approx(3 * (112 + 8 * 32) + 8)
    assert [size for size in (1, 2, 3, 32) if both.fits(size)] == [1, 2]
    kinds = ["sparse", "dense", "sparse"]
    spec = specs("ernie4_5_moe")[0]
    assert spec.router == RouterSpec(top_k=3, renormalizes=True, has_choice_bias=True, choice_bias_is_row=True)
    assert (spec.num_experts, spec.size, spec.shared_size) == (8, 32, 64)
    assert [each.kind for each in specs("ernie4_5_moe", 1)] == ["gated", "moe"] * 2 + ["gated"] * 2
    assert specs("ernie4_5_moe", 1)[1].shared_size == 0
    assert [each.kind for each in specs("ernie4_5_moe", moe_layer_end_index=-1)] == ["moe"] * 2
    found = specs("glm4_moe_lite", mlp_layer_types=kinds, first_k_dense_replace=None)
    assert [each.kind for each in found] == ["moe", "gated", "moe"]


@pytest.mark.parametrize(
    ("family", "config", "fields", "message"),
    [
        ("deepseek_v2", 3, {"scoring_func": "sigmoid"}, "scoring_func='sigmoid'.*'softmax' is"),
        (
            "deepseek_v2",
            3,
            {"topk_method": "noaux_tc"},
            "topk_method='noaux_tc' is not supported; supported are greedy",
        ),
        ("deepseek_v2", 3, {"topk_method": None}, "topk_method=null"),
        ("deepseek_v2", 3, {"norm_topk_prob": True}, "norm_topk_prob=True"),
        ("deepseek_v2", 3, {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("deepseek_v2", 3, {"n_group": None}, "n_group is missing"),
        ("deepseek_v2", 3, {"n_group": 3}, "n_group=3.*: 8 experts cannot be divided into 3 groups"),
        ("deepseek_v2", 3, {"topk_group": 5}, "topk_group=5.*: 5 of 4 groups"),
        (
            "deepseek_v2",
            3,
            {"topk_group": 1},
            "num_experts_per_tok=3, n_routed_experts=8: 1 groups of 2 experts do not have 3",
        ),
        ("deepseek_v2", 3, {"n_shared_experts": None}, "n_shared_experts=null"),
        ("deepseek_v2", 3, {"n_shared_experts": 0}, "n_shared_experts=0"),
        ("deepseek_v2", 3, {"mlp_bias": True}, "mlp_bias=True is not supported in layers with experts"),
        ("deepseek_v2", 3, {"routed_scaling_factor": 0}, "routed_scaling_factor=0 is not a positive number"),
        ("deepseek_v3", 2, {"scoring_func": "softmax"}, "scoring_func='softmax'.*'sigmoid' is"),
        ("deepseek_v3", 2, {"topk_method": "greedy"}, "topk_method='greedy'.*'noaux_tc' is"),
        ("deepseek_v3", 2, {"n_group": 8, "topk_group": 8}, "8 groups of 8 experts have no second score"),
        ("deepseek_v3", 2, {"n_group": 1, "topk_group": 2}, "2 of 1 groups"),
        ("deepseek_v3", 2, {"first_k_dense_replace": None}, "first_k_dense_replace=null"),
        ("deepseek_v3", 2, {"n_routed_experts": None}, "n_routed_experts is missing"),
        ("qwen3_5_moe", 0, {"norm_topk_prob": False}, "norm_topk_prob=False is not supported.*True is"),
        ("glm4_moe_lite", 0, {"mlp_layer_types": ["dense"] * 2}, "mlp_layer_types=.* must have num_hidden_layers=3"),
        ("glm4_moe_lite", 0, {"mlp_layer_types": ["moe"] * 3}, "each of them dense or sparse"),
        ("glm4_moe_lite", 0, {"first_k_dense_replace": 2}, "first_k_dense_replace=2 contradicts mlp_layer_types"),
        ("phimoe", 0, {"num_experts_per_tok": 3}, "num_experts_per_tok=3 is not supported.*2 is"),
        ("phimoe", 0, {"tie_word_embeddings": True}, "lm_head_bias=True with tie_word_embeddings=True"),
        ("phimoe", 0, {"router_jitter_noise": 0}, "router_jitter_noise=0 is not a positive number"),
        ("hunyuan_v1_moe", 0, {"moe_topk": [2, 3]}, r"moe_topk=\[2, 3\] is not supported; one number"),
        ("hunyuan_v1_moe", 0, {"moe_topk": 7}, "moe_topk=7 is more than the number of experts, 6"),
        ("hunyuan_v1_moe", 0, {"moe_intermediate_size": [64, 64]}, "moe_intermediate_size=64 is not supported.*112 is"),
        ("hunyuan_v1_moe", 0, {"num_shared_expert": 2}, "num_shared_expert=2 is not supported.*1 is"),
        ("hunyuan_v1_moe", 0, {"use_cla": True}, "use_cla=True"),
        ("hunyuan_v1_moe", 0, {"use_qk_norm": False}, "use_qk_norm=False"),
        ("hunyuan_v1_moe", 0, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ("ernie4_5_moe", 0, {"use_bias": True}, "use_bias=True is not supported.*False is"),
        ("ernie4_5_moe", 0, {"use_bias": None}, "use_bias=null"),
        ("ernie4_5_moe", 0, {"moe_norm_min": 0.1}, "moe_norm_min=0.1"),
        ("ernie4_5_moe", 0, {"moe_k": 9}, "moe_k=9 is more than the number of experts, 8"),
        ("ernie4_5_moe", 0, {"moe_num_experts": None}, "moe_num_experts is missing"),
        ("ernie4_5_moe", 0, {"moe_layer_end_index": -2}, "moe_layer_end_index=-2"),
        ("ernie4_5_moe", 0, {"moe_layer_interval": 0}, "moe_layer_interval=0"),
        ("glm4_moe", 0, {"num_experts_per_tok": 9}, "num_experts_per_tok=9 is more than the number of experts, 8"),
    ],
)
def test_routing_that_is_not_supported(family: str, config: int, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        specs(family, config, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": None, "num_local_experts": None}, "num_experts is missing"),
        ({"num_experts": 8, "num_local_experts": 4}, "num_experts=8 and num_local_experts=4 contradict"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 is more than the number of experts, 8"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok=0"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ({"moe_intermediate_size": "32"}, "moe_intermediate_size='32'"),
        ({"norm_topk_prob": 1}, "norm_topk_prob=1 is not true or false"),
        ({"mlp_only_layers": 3}, "mlp_only_layers=3"),
        ({"mlp_only_layers": [-1]}, r"mlp_only_layers=\[-1\]"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
    ],
)
def test_impossible_fields_are_refused_by_their_names(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        specs("qwen3_moe", **fields)


# Fields of routers and experts, with the families that read them
ROUTING_FIELDS = {
    "mixtral": ("num_local_experts", "num_experts_per_tok"),
    "qwen3_moe": ("num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step"),
    "qwen2_moe": ("shared_expert_intermediate_size",),
    "deepseek_v3": ("n_routed_experts", "n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"),
    "ernie4_5_moe": ("moe_num_experts", "moe_k", "moe_layer_interval", "moe_layer_start_index"),
    "hunyuan_v1_moe": ("num_experts", "moe_topk"),
    "lfm2_moe": ("num_dense_layers", "num_experts"),
    "gemma4": ("num_experts", "top_k_experts"),
}
CONFIG_WITH_EXPERTS = {"gemma4": 3, "deepseek_v3": 2}


def described(family: str, **fields: Any) -> ModelArchitecture:
    config = FAMILY_CONFIGS[family][CONFIG_WITH_EXPERTS.get(family, 0)]
    return describe_model({**config.to_dict(), "architectures": None, **fields}, "auto")


@pytest.mark.parametrize("value", ["8", -1, -2.0, 2.5, True, {}, float("nan")])
@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family, names in ROUTING_FIELDS.items() for name in names]
)
def test_an_impossible_number_of_a_router_is_refused_instead_of_left_to_transformers(
    family: str, name: str, value: object
) -> None:
    assert described(family).implementation == INFLIGHT
    with pytest.raises(ImpossibleFieldError, match=f"{name}={re.escape(repr(value))}"):
        described(family, **{name: value})


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("mixtral", {"num_experts_per_tok": 5}),
        ("mixtral", {"num_local_experts": 0}),
        ("mixtral", {"num_local_experts": 4, "num_experts": 5}),
        ("gpt_oss", {"num_experts_per_tok": 0}),
        ("deepseek_v2", {"topk_method": "noaux_tc"}),
        ("deepseek_v2", {"num_experts_per_tok": None}),
        ("deepseek_v3", {"scoring_func": "softmax"}),
        ("deepseek_v3", {"routed_scaling_factor": -1.0}),
        ("deepseek_v3", {"topk_group": 5}),
        ("qwen3_moe", {"mlp_only_layers": ["1"]}),
        ("qwen3_moe", {"norm_topk_prob": "yes"}),
        ("phimoe", {"num_experts_per_tok": 3}),
    ],
)
def test_routing_that_transformers_would_not_notice_is_refused(family: str, fields: dict[str, Any]) -> None:
    if family == "deepseek_v2":
        fields = {**FAMILY_CONFIGS[family][3].to_dict(), **fields}
    with pytest.raises(ImpossibleFieldError, match=next(reversed(fields)) if len(fields) < 3 else None):
        described(family, **fields)


def test_phi_moe_under_the_name_that_released_checkpoints_have() -> None:
    config = {**FAMILY_CONFIGS["phimoe"][0].to_dict(), "architectures": ["PhiMoEForCausalLM"]}
    assert describe_model(config, "auto").implementation == INFLIGHT


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "qwen3_next"])
def test_a_model_of_a_family_with_experts_may_have_none(family: str) -> None:
    found = described(family, num_experts=0, num_local_experts=None)
    assert found.implementation == INFLIGHT and {layer.mlp.kind for layer in found.layers} == {"gated"}
    assert described(family, num_experts=[4, 4]).implementation == TRANSFORMERS  # a number for each layer


@pytest.mark.parametrize(
    "fields", [{"num_experts": "8"}, {"num_experts": 8, "num_experts_per_tok": 9}, {"moe_topk": -1}, {"moe_k": True}]
)
def test_experts_of_a_family_that_only_transformers_knows(fields: dict[str, Any]) -> None:
    sizes = {"model_type": "x", "vocab_size": 9, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    assert (
        describe_model({**sizes, "num_experts": [8, 4, 8], "moe_topk": [2, 1, 2]}, "auto").implementation
        == TRANSFORMERS
    )
    assert describe_model({**sizes, "num_experts": 1, "num_experts_per_tok": 2}, "auto").implementation == TRANSFORMERS
    with pytest.raises(ImpossibleFieldError, match=next(reversed(fields))):
        describe_model({**sizes, **fields}, "auto")
