"""Counts that follow from the sizes of layers: of weights, of states, of ranks that can share them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inflight.config.architecture import AttentionSpec, GatedDeltaSpec, LatentSpec, ShortConvSpec

PLAIN = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=16, rope=None)
LATENT = LatentSpec(rank=32, query_rank=None, nope_dim=12, rope_dim=4, value_dim=10)
DELTA = GatedDeltaSpec(num_key_heads=4, num_value_heads=8, key_dim=6, value_dim=10, kernel_size=4)
CONV = ShortConvSpec(num_channels=24, kernel_size=3)


@pytest.mark.parametrize(
    ("spec", "inputs", "outputs"),
    [
        (PLAIN, 8 * 16 + 2 * 2 * 16, 8 * 16),
        (replace(PLAIN, has_gate=True), 2 * 8 * 16 + 2 * 2 * 16, 8 * 16),
        (replace(PLAIN, kv_layer=0), 8 * 16, 8 * 16),
        (replace(PLAIN, num_kv_heads=1, head_dim=36, latent=LATENT), 8 * (12 + 4) + 32 + 4, 8 * 10),
        (replace(PLAIN, num_kv_heads=1, head_dim=36, latent=replace(LATENT, query_rank=20)), 20 + 32 + 4, 8 * 10),
        (DELTA, 2 * 4 * 6 + 8 * 10 + 8 * 10 + 2 * 8, 8 * 10),  # queries, keys, values, gates, two numbers of each head
        (CONV, 3 * 24, 24),
    ],
)
def test_features(spec: AttentionSpec | GatedDeltaSpec | ShortConvSpec, inputs: int, outputs: int) -> None:
    assert spec.num_features == inputs + outputs


def test_what_is_rotated() -> None:
    assert PLAIN.rotated_dim == 16
    assert replace(PLAIN, num_kv_heads=1, head_dim=36, latent=LATENT).rotated_dim == 4


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_states(tp_size: int, itemsize: int) -> None:
    matrices = 8 // tp_size * 6 * 10 * 4  # always in float32
    assert DELTA.state_bytes(itemsize, tp_size) == matrices + 3 * (2 * 4 * 6 + 8 * 10) // tp_size * itemsize
    assert CONV.state_bytes(itemsize, tp_size) == 2 * 24 // tp_size * itemsize


def test_which_numbers_of_ranks_can_share_a_layer() -> None:
    found = {spec: [size for size in (1, 2, 3, 4, 8, 16) if spec.fits(size)] for spec in (PLAIN, DELTA, CONV)}
    assert found == {PLAIN: [1, 2, 4, 8], DELTA: [1, 2, 4], CONV: [1, 2, 3, 4, 8]}
    assert not replace(PLAIN, num_heads=12, num_kv_heads=3).fits(2)
    assert replace(PLAIN, num_heads=12, num_kv_heads=3).fits(6)
