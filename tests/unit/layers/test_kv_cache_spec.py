"""What a layer's cache takes in each dtype; every name is one that the arena can be viewed in."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inflight.attention.backend import AttentionParams
from inflight.device.base import TORCH_DTYPES
from inflight.layers.attention import Attention


@pytest.mark.parametrize(
    ("dtype", "bytes_per_head"),
    [(torch.float32, 64), (torch.bfloat16, 32), (torch.int8, 16 + 4), (torch.float8_e4m3fn, 16)],
)
def test_integers_have_a_scale_and_floats_have_none(dtype: torch.dtype, bytes_per_head: int) -> None:
    backend: Any = None  # Any: not asked
    layer = Attention("x", num_heads=4, num_kv_heads=2, head_dim=16, params=AttentionParams(1), backend=backend)
    spec = layer.kv_cache_spec(8, dtype)
    assert TORCH_DTYPES[spec.dtype] == dtype
    assert spec.bytes_per_token == 2 * 2 * bytes_per_head


def attention(owner: Attention | None = None, **params: Any) -> Attention:
    backend: Any = None  # Any: not asked
    return Attention(
        "x", num_heads=4, num_kv_heads=2, head_dim=16, params=AttentionParams(1, **params), backend=backend, owner=owner
    )


def test_a_layer_without_a_cache_of_its_own_is_bound_with_its_owner() -> None:
    owner = attention()
    readers = [attention(owner), attention(owner)]
    assert owner.owns_cache and not any(reader.owns_cache for reader in readers)
    cache = torch.zeros(1)
    owner.bind(cache, 3)
    for layer in (owner, *readers):
        assert layer.kv_cache is cache and layer.group_index == 3
    owner.bind(None, 0)
    assert all(reader.kv_cache is None for reader in readers)


def test_a_cache_is_described_by_the_attention() -> None:
    assert attention(sliding_window=9).kv_cache_spec(8, torch.float32).sliding_window == 9
    latent = attention(value_dim=8).kv_cache_spec(8, torch.float32)
    assert not latent.has_values and latent.sliding_window is None
    assert latent.bytes_per_token == attention().kv_cache_spec(8, torch.float32).bytes_per_token // 2


def test_a_layer_reads_the_metadata_of_its_group() -> None:
    seen: list[object] = []

    class Backend:
        def attend(self, heads: object, *arguments: Any, **_: Any) -> None:
            seen.append(arguments[2].metadata)

        def forward(self, *arguments: Any) -> None:
            seen.append(arguments[3].metadata)

    layer = attention()
    layer.backend = Backend()
    layer.bind(torch.zeros(1), 1)
    metadata: Any = ("of group 0", "of group 1")
    nothing: Any = torch.zeros(1, 1, 1)
    layer(nothing, nothing, None, metadata)
    layer.forward_rotated(nothing, nothing, nothing, metadata)
    assert seen == ["of group 1"] * 2
