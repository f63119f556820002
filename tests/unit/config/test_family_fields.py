"""The parts of a model that several families describe in the same way."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.config.architecture import GELU_TANH, SILU, GatedMlpSpec, LayerSpec
from inflight.config.families.family_fields import FamilyFields, parse_dtype
from inflight.config.mixers import AttentionSpec, RopeConfig
from inflight.errors import UnsupportedModelError

SIZES = {
    "vocab_size": 9,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 100,
}
LAYER = LayerSpec(mixer=AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, rope=None), mlp=GatedMlpSpec(size=96))


def fields(**given: Any) -> FamilyFields:
    return FamilyFields({**SIZES, **given})


def without(*names: str) -> FamilyFields:
    return FamilyFields({name: value for name, value in SIZES.items() if name not in names})


def test_sizes_of_heads_come_from_the_fields_or_their_defaults() -> None:
    attention = fields().attention()
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (4, 2, 16)
    assert attention.rope == RopeConfig() and not attention.qkv_bias and not attention.output_bias
    assert fields().attention(has_rope=False).rope is None
    assert fields().attention(head_dim=8).head_dim == 8
    assert fields(head_dim=32).attention(head_dim=8).head_dim == 32
    assert fields(num_key_value_heads=None).attention().num_kv_heads == 4
    assert without("num_key_value_heads").attention(absent_kv_heads_mean_all=True).num_kv_heads == 4
    assert fields(hidden_size=66).attention(head_dim=8).head_dim == 8
    for reads in (True, False):
        found = fields(attention_bias=True).attention(reads_bias=reads)
        assert (found.qkv_bias, found.output_bias) == (reads, reads)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (fields(num_key_value_heads=3), "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        (fields(hidden_size=66), "hidden_size=66 is not a multiple of num_attention_heads=4, and head_dim is missing"),
        (fields(head_dim=15), "head_dim=15 is odd; rotary embedding needs pairs"),
        (without("num_key_value_heads"), "num_key_value_heads is missing"),
    ],
)
def test_heads_that_do_not_fit(given: FamilyFields, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        given.attention()


@pytest.mark.parametrize(
    ("name", "activation"), [("silu", SILU), ("swish", SILU), ("gelu_pytorch_tanh", GELU_TANH), ("gelu_new", GELU_TANH)]
)
def test_an_mlp(name: str, activation: str) -> None:
    assert fields(act=name).mlp(name="act") == GatedMlpSpec(size=96, activation=activation)
    assert fields().mlp(default=name).activation == activation
    assert fields().mlp(bias=True, is_fused=True) == GatedMlpSpec(size=96, bias=True, is_fused=True)
    if activation == SILU:
        assert fields(hidden_act=name).silu_mlp() == GatedMlpSpec(size=96)
    else:
        with pytest.raises(UnsupportedModelError, match=f"hidden_act='{name}'"):
            fields(hidden_act=name).silu_mlp()


def test_a_soft_cap_of_null_is_none_and_an_absent_one_has_the_default() -> None:
    assert [fields().soft_cap("cap", default) for default in (None, 5.0)] == [None, 5.0]
    assert [fields(cap=7).soft_cap("cap", default) for default in (None, 5.0)] == [7.0, 7.0]
    assert [fields(cap=None).soft_cap("cap", default) for default in (None, 5.0)] == [None, None]


def test_windows() -> None:
    assert (fields().window(), fields().window(7), fields(sliding_window=9).window(7)) == (4096, 7, 9)
    assert fields(sliding_window=None).window(7) is None
    layers = fields().layers_with_windows(LAYER, [None, 99, 100, 101])
    assert [layer.attention.window for layer in layers if layer.attention] == [None, 99, None, None]
    chosen = fields(layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"])
    assert chosen.windows([False] * 4, 9) == [9, None, 9, None]
    assert fields().windows([True, False, False, True], 9) == [9, None, None, 9]
    chosen.refuse_other_windows([True, False, True, False], 9, "X")
    with pytest.raises(UnsupportedModelError, match="is not supported for X"):
        chosen.refuse_other_windows([True] * 4, 9, "X")
    with pytest.raises(UnsupportedModelError, match="no window is in use"):
        chosen.windows([False] * 4, None)
    assert fields(layer_types=["full_attention"] * 4).windows([True] * 4, None) == [None] * 4


def test_two_kinds_of_layers() -> None:
    ropes = RopeConfig(theta=1.5), RopeConfig(theta=2.5)
    layers = fields(sliding_window=9).two_kinds_of_layers(LAYER, ropes, 3)
    found = [(layer.attention.window, layer.attention.rope) for layer in layers if layer.attention]
    assert found == [(9, ropes[1]), (9, ropes[1]), (None, ropes[0]), (9, ropes[1])]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (7.0, 8.0)),
        ({"rope_theta": 3.0, "local": 4.0}, (3.0, 4.0)),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, (5.0, 8.0)),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 6.0}}, "rope_theta": 3.0, "local": 4.0}, (3.0, 6.0)),
    ],
)
def test_rotary_embeddings_of_both_kinds(given: dict[str, Any], expected: tuple[float, float]) -> None:
    full, local = fields(**given).ropes(16, theta=7.0, local_theta=8.0, local_name="local")
    assert (full.theta, local.theta) == expected
    scaled, local = fields(rope_scaling={"type": "linear", "factor": 2}, **given).ropes(16, theta=7.0, local_theta=8.0)
    assert (scaled.kind, scaled.factor, local.kind) == ("linear", 2.0, "default")


def test_which_layers_are_recurrent() -> None:
    default = [True, False, False, True]
    assert fields().which_have_attention("conv", default) == default
    given = ["conv", "full_attention", "conv", "conv"]
    assert fields(layer_types=given).which_have_attention("conv", default) == [False, True, False, False]
    for wrong in (["conv"] * 4, given[:3], [*given[:3], "mamba"]):
        with pytest.raises(UnsupportedModelError, match="each must be conv or full_attention"):
            fields(layer_types=wrong).which_have_attention("conv", default)


def test_what_all_architectures_have() -> None:
    found = fields(dtype="bfloat16", eos_token_id=5).architecture((LAYER,), eps=0.5, is_tied=True)
    assert (found.vocab_size, found.hidden_size, found.max_position_embeddings) == (9, 64, 100)
    assert (found.rms_norm_eps, found.tie_word_embeddings, found.dtype, found.eos_token_ids) == (
        0.5,
        True,
        "bfloat16",
        (5,),
    )
    found = fields(rms_norm_eps=0.25, tie_word_embeddings=False).architecture((LAYER,), eps=0.5, is_tied=True)
    assert (found.rms_norm_eps, found.tie_word_embeddings, found.layers) == (0.25, False, (LAYER,))
    assert not fields().architecture((LAYER,)).tie_word_embeddings


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ({}, "float32"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
        ({"dtype": "fp16", "torch_dtype": "float32"}, "float16"),
        ({"dtype": "BF16"}, "bfloat16"),
        ({"dtype": "double"}, "float32"),
        ({"dtype": "auto"}, "float32"),
    ],
)
def test_names_of_dtypes(given: dict[str, Any], dtype: str) -> None:
    assert parse_dtype(fields(**given)) == dtype
    with pytest.raises(UnsupportedModelError, match=r"dtype='int8' .*float32, "):
        parse_dtype(fields(dtype="int8"))
