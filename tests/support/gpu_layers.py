"""Models whose layers are those of a GPU, on the CPU in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from inflight.kernels.triton.layer_ops import TritonLayerOps
from inflight.layers import linear_tuner
from inflight.layers.gpu_choices import KeptChoices
from inflight.layers.gpu_linear import GpuLinear
from tests.support.triton_inputs import IS_INTERPRETED


class TritonIsFaster:
    """A clock by which nothing is slower than the library."""

    num_multiprocessors, cache_bytes = 4, 0

    def __init__(self, device: torch.device) -> None:
        self._time = 0.0

    def microseconds(self, calls: Sequence[Callable[[], None]]) -> float:
        self._time -= 1.0
        return self._time


def use_gpu_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """For models that are loaded from now on."""
    if not IS_INTERPRETED:
        pytest.skip("the interpreter stands in for a GPU only where there is none")

    def select_linear_method(
        device: torch.device, dtype: torch.dtype, *, out_dtype: torch.dtype, quantization: str | None, group_size: int
    ) -> GpuLinear:
        return GpuLinear(device, dtype, out_dtype, quantization=quantization, group_size=group_size, min_weight_bytes=0)

    monkeypatch.setattr("inflight.layers.context.select_linear_method", select_linear_method)
    monkeypatch.setattr("inflight.layers.context.select_layer_ops", lambda device, dtype: TritonLayerOps())
    monkeypatch.setattr(linear_tuner, "GraphClock", TritonIsFaster)
    monkeypatch.setattr(linear_tuner, "kept_choices", lambda device: KeptChoices(None))
