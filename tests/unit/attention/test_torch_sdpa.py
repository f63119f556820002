from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from inflight.attention.torch_sdpa import PIECE_TOKENS, TorchSdpaBackend
from inflight.interface.kv_cache import KVCacheSpec
from tests.unit.attention.paged_case import Case, World, cases

CASE = Case(
    num_kv_heads=2,
    per_head=2,
    head_dim=16,
    block_size=4,
    window=None,
    num_layers=2,
    padding=0,
    steps=((5, 9, 1, 0), (1, 1, 3, 30), (1, 20, 1, 1), (3, 3, 1, 3)),
    seed=0,
)


def world(case: Case) -> World:
    return World(case, TorchSdpaBackend())


@hypothesis.given(cases())
def test_float32_equals_the_reference(case: Case) -> None:
    assert world(case).run() < 1e-5


@hypothesis.given(cases())
def test_bfloat16_equals_the_reference(case: Case) -> None:
    assert world(dataclasses.replace(case, dtype=torch.bfloat16)).run() < 4e-2


@pytest.mark.parametrize("window", [None, 1, 6, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_dtype(dtype: torch.dtype, window: int | None) -> None:
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
    assert world(dataclasses.replace(CASE, dtype=dtype, window=window)).run() < tolerance


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("soft_cap", "has_sinks"), [(0.5, False), (None, True), (0.5, True)])
def test_soft_cap_and_sinks(dtype: torch.dtype, window: int | None, soft_cap: float | None, has_sinks: bool) -> None:
    for is_causal in (True, False):
        case = dataclasses.replace(
            CASE, dtype=dtype, window=window, soft_cap=soft_cap, has_sinks=has_sinks, is_causal=is_causal
        )
        assert world(case).run() < {torch.bfloat16: 2e-2, torch.float32: 1e-5}[dtype]


@pytest.mark.parametrize("bias_radius", [0, 5, 200])
def test_biases_of_positions(bias_radius: int) -> None:
    for is_causal in (True, False):
        case = dataclasses.replace(CASE, dtype=torch.float32, bias_radius=bias_radius, is_causal=is_causal)
        assert world(case).run() < 1e-5


@pytest.mark.parametrize("window", [None, 6])
def test_values_that_are_elements_of_the_keys(window: int | None) -> None:
    assert world(dataclasses.replace(CASE, value_dim=10, window=window)).run() < 1e-5


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [None, 90, 300])
def test_chunks_longer_than_a_piece(window: int | None, dtype: torch.dtype, is_causal: bool) -> None:
    steps = ((2 * PIECE_TOKENS + 3, 5), (1, PIECE_TOKENS + 40), (20, 1))
    case = dataclasses.replace(
        CASE, steps=steps, window=window, block_size=16, num_layers=1, dtype=dtype, is_causal=is_causal
    )
    assert world(case).run() < (2e-2 if dtype == torch.bfloat16 else 1e-5)


def test_the_view_aliases_its_layer_alone() -> None:
    spec = KVCacheSpec(block_size=4, num_kv_heads=2, head_dim=8, dtype="float32", itemsize=4)
    arena = torch.zeros(3, 2 * spec.block_bytes + 12, dtype=torch.uint8)
    view = TorchSdpaBackend().kv_cache_view(arena, spec, 1)
    assert view.dtype == torch.float32
    assert view[0].numel() * 4 == spec.block_bytes
    view.fill_(-1.0)
    assert not arena[:, : spec.block_bytes].any()
    assert not arena[:, 2 * spec.block_bytes :].any()
    assert arena[:, spec.block_bytes : 2 * spec.block_bytes].view(torch.float32).eq(-1).all()


def test_metadata_keeps_no_reference_to_its_inputs() -> None:
    case = dataclasses.replace(CASE, steps=((3, 20), (1, 20)), num_layers=1)
    truth, staged = world(case), world(case)
    build = staged.backend.build_metadata

    def build_and_overwrite(inputs, spec):
        copies = dataclasses.replace(
            inputs, **{name: getattr(inputs, name).copy() for name in ("query_start_loc", "seq_lens", "block_table")}
        )
        metadata = build(copies, spec)
        for array in (copies.query_start_loc, copies.seq_lens, copies.block_table):
            array.fill(-1)
        return metadata

    staged.backend.build_metadata = build_and_overwrite
    assert truth.run() == staged.run() < 1e-5


class CallsOfAttention(TorchFunctionMode):
    """Counts the calls of `scaled_dot_product_attention`."""

    count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is F.scaled_dot_product_attention
        return function(*args, **(kwargs or {}))


class FlashKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the flash kernels that run."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [20, 64, 128])
def test_every_path_reaches_the_flash_kernel(dtype: torch.dtype, head_dim: int) -> None:
    """The math path is some ten times slower, and torch takes it without a word."""
    case = dataclasses.replace(CASE, dtype=dtype, head_dim=head_dim, num_layers=1)
    for window in (None, 6):
        built = world(dataclasses.replace(case, window=window))
        for lengths in case.steps:
            with CallsOfAttention() as calls, FlashKernels() as kernels:
                built.step(np.array(lengths))
            assert 0 < calls.count == kernels.count
