"""`GpuLinear`: linear layers on an NVIDIA GPU, with weights in floats, in integers of 4 or 8 bits, or in fp8.

Products with many rows use the libraries behind torch (cuBLAS). For few rows, `linear_tuner` measures the library and Triton
kernels at start-up, and chooses the fastest.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from inflight.errors import ConfigError
from inflight.kernels.quantized_weight import QuantizedWeight, fitting_group_size, quantize_rows
from inflight.kernels.triton.experts import ExpertLayer, ExpertWeights
from inflight.kernels.triton.layer_ops import quantize_rows_fp8
from inflight.kernels.triton.linear import FP8_TILES, library_linear, linear, linear_configs
from inflight.kernels.triton.split_k import SplitKScratch, TileConfig
from inflight.kernels.triton.weight_only import (
    GROUP_SIZES,
    PackedIntegers,
    can_pack,
    dequantize,
    pack_integers,
    weight_only_configs,
    weight_only_linear,
)
from inflight.kernels.weight_rows import StoredWeight, in_memory
from inflight.layers.gpu_experts import stack_floats, stack_fp8, stack_integers
from inflight.layers.linear_method import LinearChoice, LinearMethod, PreparedExperts, PreparedLinear
from inflight.layers.linear_tuner import MIN_WEIGHT_BYTES, GpuWeight, TunedLinear, tune

logger = logging.getLogger(__name__)

FP8_MULTIPLE = 16  # in_features and out_features of the weight must be multiples of this number
_FP8_CAPABILITY = (8, 9)
_DEQUANTIZED_AT_ONCE = 2**25  # number of weights; in a 16-bit dtype they have 64 MB
_QUANTIZED_AT_ONCE = 2**24  # number of weights


class FloatWeight(GpuWeight):
    """A weight [out_features, in_features] in the engine's dtype. A float32 weight is multiplied only by torch's library,
    because the Triton kernel uses tensor cores, which would round float32."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight.contiguous()
        self.kind = "floats"
        self.shape = (weight.shape[0], weight.shape[1])
        self.num_bytes = weight.nbytes

    def tiles(self, num_multiprocessors: int) -> list[TileConfig]:
        if self._weight.dtype == torch.float32:
            return []
        return linear_configs(*self.shape, num_multiprocessors)

    def multiply(
        self, x: Tensor, bias: Tensor | None, out: Tensor, tile: TileConfig, scratch: SplitKScratch, *, gate: str | None
    ) -> None:
        linear(x, self._weight, bias, out, tile, scratch, gate=gate)

    def multiply_by_library(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        library_linear(x, self._weight, bias, out)

    def stack(self, weights: Sequence[GpuWeight]) -> ExpertWeights:
        return stack_floats([each._weight for each in weights if isinstance(each, FloatWeight)])

    def floats(self, dtype: torch.dtype) -> Tensor:
        return self._weight


class IntegerWeight(GpuWeight):
    """A weight of 4 or 8 bits. For torch's library, it is first converted to x's dtype, some output features at a time."""

    def __init__(self, weight: PackedIntegers) -> None:
        self._weight = weight
        self.kind = f"{weight.bits} bits in groups of {weight.group_size}"
        self.shape = (weight.out_features, weight.in_features)
        self.num_bytes = weight.values.nbytes

    def tiles(self, num_multiprocessors: int) -> list[TileConfig]:
        return weight_only_configs(self._weight, num_multiprocessors)

    def multiply(
        self, x: Tensor, bias: Tensor | None, out: Tensor, tile: TileConfig, scratch: SplitKScratch, *, gate: str | None
    ) -> None:
        weight_only_linear(x, self._weight, bias, out, tile, scratch, gate=gate)

    def multiply_by_library(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        out_features, in_features = self.shape
        step = max(1, _DEQUANTIZED_AT_ONCE // in_features)
        for first in range(0, out_features, step):
            features = slice(first, min(out_features, first + step))
            weight = x.new_empty((features.stop - first, in_features))
            dequantize(self._weight, first, weight)
            library_linear(x, weight, None if bias is None else bias[features], out[:, features])

    def stack(self, weights: Sequence[GpuWeight]) -> ExpertWeights:
        return stack_integers([each._weight for each in weights if isinstance(each, IntegerWeight)])

    def floats(self, dtype: torch.dtype) -> Tensor:
        plain = torch.empty(self.shape, dtype=dtype, device=self._weight.values.device)
        dequantize(self._weight, 0, plain)
        return plain


class Fp8Weight(GpuWeight):
    """A weight in float8_e4m3fn with one scale per row. For torch's library, the rows of x are rounded to fp8, too. The Triton
    kernel instead converts the weight to x's dtype, which must not be float32."""

    def __init__(self, weight: Tensor) -> None:
        self.kind = "fp8"
        self.shape = (weight.shape[0], weight.shape[1])
        self._is_wide = weight.dtype == torch.float32
        self._weight = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
        self._scales = weight.new_empty((weight.shape[0], 1), dtype=torch.float32)
        step = max(1, _QUANTIZED_AT_ONCE // weight.shape[1])
        for first in range(0, len(weight), step):
            rows = slice(first, first + step)
            self._weight[rows], self._scales[rows] = quantize_rows_fp8(weight[rows])
        self.num_bytes = self._weight.nbytes

    def tiles(self, num_multiprocessors: int) -> list[TileConfig]:
        if self._is_wide:
            return []
        return linear_configs(*self.shape, num_multiprocessors, FP8_TILES)

    def multiply(
        self, x: Tensor, bias: Tensor | None, out: Tensor, tile: TileConfig, scratch: SplitKScratch, *, gate: str | None
    ) -> None:
        linear(x, self._weight, bias, out, tile, scratch, scales=self._scales.view(-1), gate=gate)

    def multiply_by_library(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        if len(x) == 0:
            return
        rows, scales = quantize_rows_fp8(x)
        product = torch._scaled_mm(
            rows,
            self._weight.t(),
            scale_a=scales,
            scale_b=self._scales.t(),
            out_dtype=torch.bfloat16,  # the only dtype that torch supports with one scale per row
            use_fast_accum=True,
            out=out if out.dtype == torch.bfloat16 else None,
        )
        if out.dtype != torch.bfloat16:
            out.copy_(product)
        if bias is not None:
            out.add_(bias)

    def stack(self, weights: Sequence[GpuWeight]) -> ExpertWeights:
        all_fp8 = [each for each in weights if isinstance(each, Fp8Weight)]
        return stack_fp8([each._weight for each in all_fp8], [each._scales for each in all_fp8])

    def floats(self, dtype: torch.dtype) -> Tensor:
        return (self._weight.float() * self._scales).to(dtype)


class GpuLinear(LinearMethod):
    """See the module docstring.

    Args:
        dtype, out_dtype: the dtypes of the rows of x and of the results with which `tune` measures the speed.
        quantization: how weights in floats are quantized: "int8", "int4", "fp8" or None.
        min_weight_bytes: `tune` does not measure smaller weights. They always use torch's library.

    Raises:
        ConfigError: `quantization` is "fp8", and the GPU cannot multiply in fp8.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        *,
        quantization: str | None,
        group_size: int,
        min_weight_bytes: int = MIN_WEIGHT_BYTES,
    ) -> None:
        if quantization == "fp8":
            _check_fp8(device)
        self._device = device
        self._dtype = dtype
        self._out_dtype = out_dtype
        self._quantization = quantization
        self._group_size = group_size
        self._min_weight_bytes = min_weight_bytes
        self._layers: list[TunedLinear] = []

    @cached_property
    def _scratch(self) -> SplitKScratch:
        return SplitKScratch(self._device)

    def prepare(self, weight: StoredWeight, bias: Tensor | None, *, gate: str | None = None) -> PreparedLinear:
        layer = TunedLinear(self._on_the_gpu(in_memory(weight)), bias, self._scratch, gate=gate)
        self._layers.append(layer)
        return layer

    def prepare_experts(
        self,
        gate_up: Sequence[PreparedLinear],
        down: Sequence[PreparedLinear],
        gate: str,
        shared: Callable[[Tensor], Tensor] | None,
    ) -> PreparedExperts:
        weights_up, weights_down = (
            self._stack([each for each in part if isinstance(each, TunedLinear)]) for part in (gate_up, down)
        )
        taken = {id(each) for each in (*gate_up, *down)}
        self._layers = [layer for layer in self._layers if id(layer) not in taken]
        return ExpertLayer(weights_up, weights_down, gate, shared)

    def _stack(self, experts: Sequence[TunedLinear]) -> ExpertWeights:
        weights = [expert.weight for expert in experts]
        if len({weight.kind for weight in weights}) > 1:
            logger.warning("%d experts of a layer become floats, because their formats differ", len(weights))
            weights = [FloatWeight(weight.floats(self._dtype)) for weight in weights]
        biases = [expert.bias for expert in experts if expert.bias is not None]
        return replace(weights[0].stack(weights), bias=torch.stack(biases) if biases else None)

    def tune(self, max_num_rows: int) -> list[LinearChoice]:
        return tune(
            self._layers,
            max_num_rows,
            device=self._device,
            dtype=self._dtype,
            out_dtype=self._out_dtype,
            min_weight_bytes=self._min_weight_bytes,
        )

    def _on_the_gpu(self, weight: Sequence[Tensor] | QuantizedWeight) -> GpuWeight:
        if isinstance(weight, QuantizedWeight):
            return self._integers(weight.to(self._device).without_table())  # no kernel for GPUs looks integers up
        [plain] = weight  # for this class, a weight in floats is always one tensor
        out_features, in_features = plain.shape
        if self._quantization == "fp8":
            if out_features % FP8_MULTIPLE == 0 and in_features % FP8_MULTIPLE == 0:
                return Fp8Weight(plain)
            logger.warning(
                "a weight of %dx%d stays in floats: fp8 needs two multiples of 16", out_features, in_features
            )
        elif self._quantization is not None:
            if in_features % GROUP_SIZES[-1] == 0:
                return self._integers(self._quantize(plain))
            logger.warning(
                "a weight of %dx%d stays in floats: %s needs in_features to be a multiple of %d",
                out_features,
                in_features,
                self._quantization,
                GROUP_SIZES[-1],
            )
        return FloatWeight(plain)

    def _integers(self, weight: QuantizedWeight) -> GpuWeight:
        if not can_pack(weight.shape[1], weight.group_size):
            logger.warning(
                "a weight of %dx%d in groups of %d becomes floats: GPU kernels need groups whose size is a multiple of %d",
                *weight.shape,
                weight.group_size,
                GROUP_SIZES[-1],
            )
            return FloatWeight(weight.dequantize().to(self._dtype))
        return IntegerWeight(pack_integers(weight, dtype=self._dtype))

    def _quantize(self, weight: Tensor) -> QuantizedWeight:
        if self._quantization == "int8":
            return quantize_rows(weight, bits=8, group_size=0)
        group_size = fitting_group_size(weight.shape[1], self._group_size)
        assert group_size is not None, "the caller checks that it is a multiple of 32"
        return quantize_rows(weight, bits=4, group_size=group_size)


def _check_fp8(device: torch.device) -> None:
    capability = torch.cuda.get_device_capability(device)
    if capability < _FP8_CAPABILITY:
        raise ConfigError(
            f"quantization='fp8' needs a GPU of compute capability 8.9 or newer (Ada, Hopper), and {device} has "
            f"{capability[0]}.{capability[1]}: use int8 or int4, or leave quantization out"
        )
