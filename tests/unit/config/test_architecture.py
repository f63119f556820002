"""What an architecture says about itself: sizes, what divides it, and the longest request."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inflight.config.architecture import GatedMlpSpec, LayerSpec, ModelArchitecture
from inflight.config.mixers import (
    AttentionSpec,
    BaseAttentionSpec,
    GatedDeltaSpec,
    LatentAttentionSpec,
    RopeConfig,
    ShortConvSpec,
)

PLAIN = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=8, rope=None)
LATENT = LatentAttentionSpec(
    num_heads=6, head_dim=15, rope=None, rank=11, query_rank=None, nope_dim=3, rope_dim=4, value_dim=5
)
DELTA = GatedDeltaSpec(num_key_heads=2, num_value_heads=4, key_dim=3, value_dim=5, kernel_size=4)
CONV = ShortConvSpec(num_channels=6, kernel_size=3)


def model(*layers: LayerSpec) -> ModelArchitecture:
    return ModelArchitecture(
        name="x", vocab_size=9, hidden_size=8, layers=layers, rms_norm_eps=1e-6, max_position_embeddings=100
    )


def attending(attention: BaseAttentionSpec) -> LayerSpec:
    return LayerSpec(mixer=attention, mlp=GatedMlpSpec(size=12))


@pytest.mark.parametrize(
    ("mixer", "count"),
    [
        (PLAIN, (6 + 2 + 2 + 6) * 8),
        (replace(PLAIN, has_gate=True), (2 * 6 + 2 + 2 + 6) * 8),
        (replace(PLAIN, kv_layer=0), (6 + 6) * 8),
        (replace(PLAIN, kv_layer=1, has_gate=True), (12 + 6) * 8),
        (LATENT, 6 * (3 + 4) + 11 + 4 + 6 * 5),
        (replace(LATENT, query_rank=13), 13 + 11 + 4 + 6 * 5),
        # queries, keys, values; a gate and the output for each value, two numbers for each value head
        (DELTA, 2 * 2 * 3 + 4 * 5 + 2 * 4 * 5 + 2 * 4),
        (CONV, 3 * 6 + 6),
    ],
)
def test_features_of_the_projections(mixer: AttentionSpec | GatedDeltaSpec | ShortConvSpec, count: int) -> None:
    assert mixer.num_features == count


def test_bytes_of_a_state() -> None:
    """The matrices of the gated delta rule are float32; what a convolution has still to see has the dtype of the model."""
    channels = 2 * 2 * 3 + 4 * 5
    assert DELTA.state_bytes(2, 1) == 4 * 4 * 3 * 5 + 3 * channels * 2
    assert DELTA.state_bytes(4, 2) == 4 * 2 * 3 * 5 + 3 * channels // 2 * 4
    assert CONV.state_bytes(2, 1) == 2 * 6 * 2
    assert CONV.state_bytes(4, 3) == 2 * 2 * 4


@pytest.mark.parametrize(
    ("mixer", "sizes"),
    [
        (PLAIN, [1, 2, 6]),  # 3 ranks cannot share 2 key/value heads
        (replace(PLAIN, num_kv_heads=1), [1, 2, 3, 6]),
        (DELTA, [1, 2]),
        (CONV, [1, 2, 3, 6]),
    ],
)
def test_sizes_that_divide_a_layer(mixer: AttentionSpec | GatedDeltaSpec | ShortConvSpec, sizes: list[int]) -> None:
    assert [size for size in range(1, 9) if mixer.fits(size)] == sizes


def test_layers_of_several_kinds() -> None:
    latent, reader = LATENT, replace(PLAIN, kv_layer=0, head_dim=16)
    recurrent = [LayerSpec(mixer=DELTA, mlp=GatedMlpSpec(size=12)), LayerSpec(mixer=CONV, mlp=GatedMlpSpec(size=12))]
    architecture = model(attending(PLAIN), *recurrent, attending(reader), attending(latent))
    assert architecture.num_layers == 5
    assert architecture.attentions == [PLAIN, reader, latent]
    assert architecture.recurrences == [DELTA, CONV]
    assert architecture.caching == [PLAIN, latent]
    assert [layer.mixer for layer in architecture.layers] == [PLAIN, DELTA, CONV, reader, latent]
    assert architecture.head_dims == [8, 16, 15, 11]
    assert (PLAIN.rotation, latent.rotation, DELTA.rotation) == ((None, 8), (None, 4), None)
    assert (PLAIN.token_bytes(2, 4, 1), PLAIN.token_bytes(2, 0, 6)) == (2 * 2 * (8 * 2 + 4), 2 * 8 * 2)
    assert (latent.token_bytes(2, 0, 2), latent.head_products, PLAIN.head_products) == (15 * 2, {3, 11}, set())
    assert "6 query heads, 2 key/value heads" in str(PLAIN)
    assert "2 key heads" in str(DELTA) and "6 channels" in str(CONV)


def test_the_longest_request_of_longrope() -> None:
    rope = RopeConfig(kind="longrope", original_max_position_embeddings=40, factors=(1.0,), long_factors=(2.0,))
    longrope = replace(PLAIN, rope=rope)
    short = replace(PLAIN, rope=replace(rope, long_factors=()))  # the length of its training is no limit
    architecture = model(attending(PLAIN), attending(longrope), attending(short))
    assert architecture.default_max_model_len == 40
    assert model(attending(PLAIN), attending(short)).default_max_model_len == 100
    assert replace(architecture, max_position_embeddings=30).default_max_model_len == 30
    assert architecture.for_length(40) == architecture
    long = architecture.for_length(41)
    assert [each.rope.factors if each.rope else None for each in long.attentions] == [None, (2.0,), (1.0,)]
    recurrent = model(LayerSpec(mixer=CONV, mlp=GatedMlpSpec(size=12)))
    assert recurrent.for_length(100) == recurrent and recurrent.default_max_model_len == 100
