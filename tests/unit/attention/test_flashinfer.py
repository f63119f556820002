"""The arrays that FlashInfer is planned with, by a stand-in that does with them what its documentation says."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from types import SimpleNamespace

import hypothesis
import numpy as np
import pytest
import torch
from torch import Tensor

from inflight.attention.flashinfer import FlashInferBackend
from inflight.errors import ConfigError
from inflight.kernels import reference
from tests.unit.attention.paged_case import Case, World, cases
from tests.unit.attention.test_torch_sdpa import CASE

CPU = torch.device("cpu")


class StandIn:
    """`flashinfer.BatchPrefillWithPagedKVCacheWrapper` (docs.flashinfer.ai/api/attention.html), as far as it is used."""

    plans = 0

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert kv_layout == "HND"
        assert float_workspace_buffer.dtype == torch.uint8

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        StandIn.plans += 1
        for array in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert array.dtype == torch.int32
            assert array.device == CPU
        assert causal
        assert q_data_type == kv_data_type
        assert 1 <= paged_kv_last_page_len.min() <= paged_kv_last_page_len.max() <= page_size
        self.shapes = (num_qo_heads, head_dim_qk), (num_kv_heads, page_size, head_dim_qk)
        num_pages = paged_kv_indptr.diff()
        self.block_table = torch.zeros(len(num_pages), int(num_pages.max()), dtype=torch.int64)
        for row, (start, end) in enumerate(itertools.pairwise(paged_kv_indptr)):
            self.block_table[row, : end - start] = paged_kv_indices[start:end]
        self.qo_indptr, self.seq_lens = qo_indptr, (num_pages - 1) * page_size + paged_kv_last_page_len
        self.scale, self.window = sm_scale, None if window_left < 0 else window_left + 1

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        assert q.is_contiguous()
        assert (q.shape[1:], *(cache.shape[1:] for cache in paged_kv_cache)) == (self.shapes[0], *(self.shapes[1],) * 2)
        keys, values = (cache.permute(0, 2, 1, 3).double() for cache in paged_kv_cache)
        tables = self.block_table, self.qo_indptr, self.seq_lens
        out = reference.paged_attention(q.double(), keys, values, *tables, scale=self.scale, sliding_window=self.window)
        return out.to(q.dtype)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FlashInferBackend:
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=StandIn))
    monkeypatch.setattr("inflight.attention.flashinfer.WORKSPACE_BYTES", 1 << 10)
    return FlashInferBackend(CPU)


@hypothesis.settings(
    max_examples=hypothesis.settings.default.max_examples // 3,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(case=cases())
def test_equals_the_reference(backend: FlashInferBackend, case: Case) -> None:
    assert World(case, backend).run() < 1e-5


def test_a_step_is_planned_once_for_layers_that_are_alike(backend: FlashInferBackend) -> None:
    world = World(dataclasses.replace(CASE, num_layers=3), backend)
    before = StandIn.plans
    world.step(np.array([5, 9, 1, 0]))
    world.step(np.array([1, 1, 3, 30]))
    assert StandIn.plans == before + 2
    assert not backend.can_capture


def test_two_kinds_of_groups_in_a_step(backend: FlashInferBackend) -> None:
    """Layers with and without a window take turns; each kind has its own plan."""
    worlds = [World(dataclasses.replace(CASE, window=window), backend) for window in (None, 6)]
    for lengths in map(np.array, CASE.steps):
        assert max(world.step(lengths) for world in worlds) < 1e-5


def test_without_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match=r"pip install flashinfer-python.*or use 'triton'"):
        FlashInferBackend(CPU)
