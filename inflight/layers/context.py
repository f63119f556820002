"""`LayerContext`: the dtype, device, tensor-parallel group and kernels of a model's layers."""

from dataclasses import dataclass

import torch

from inflight.attention.backend import AttentionBackend
from inflight.config.engine import QuantizationConfig
from inflight.distributed.expert_parallel import ExpertParallelGroup
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.errors import ConfigError
from inflight.kernels.cpu.functions import DTYPES
from inflight.kernels.cpu.layer_ops import CpuLayerOps
from inflight.kernels.cpu.library import load_kernels
from inflight.kernels.layer_ops import LayerOps, TorchLayerOps
from inflight.layers.linear_method import KernelLinear, LinearMethod, PlainLinear


@dataclass(frozen=True, kw_only=True)
class LayerContext:
    """Each rank has one context per model, which all its layers share.

    `ops` computes norms and rotary embedding, `linear` the products of the layers, `head` the product of the logits head, and
    `floats` products with weights that are never quantized and with results in float32.
    `ep`: the ranks that divide the experts of a layer among them; None: each has a part of every expert.
    If `allocates_later` is set, layers create their large weights without memory, and the loader allocates the memory later.
    """

    dtype: torch.dtype
    device: torch.device
    tp: TensorParallelGroup
    backend: AttentionBackend
    ops: LayerOps
    linear: LinearMethod
    head: LinearMethod
    floats: LinearMethod
    ep: ExpertParallelGroup | None = None
    allocates_later: bool = False

    @property
    def weight_device(self) -> torch.device:
        """The device on which layers create their large weights."""
        return torch.device("meta") if self.allocates_later else self.device


def make_context(
    *,
    dtype: torch.dtype,
    device: torch.device,
    tp: TensorParallelGroup,
    backend: AttentionBackend,
    quantization: QuantizationConfig,
    ep: ExpertParallelGroup | None = None,
) -> LayerContext:
    """Makes the context of a model.

    Raises:
        ConfigError: the quantization needs kernels that are not installed.
    """
    linear, head, floats = (
        select_linear_method(device, dtype, out_dtype=out_dtype, quantization=kind, group_size=quantization.group_size)
        for kind, out_dtype in ((quantization.layers, dtype), (quantization.head, torch.float32), (None, torch.float32))
    )
    ops = select_layer_ops(device, dtype)
    return LayerContext(
        dtype=dtype, device=device, tp=tp, backend=backend, ops=ops, linear=linear, head=head, floats=floats, ep=ep
    )


def select_layer_ops(device: torch.device, dtype: torch.dtype) -> LayerOps:
    """Returns the Triton kernels on an NVIDIA GPU, and on a CPU the C++ kernels or, if they cannot be used, plain torch."""
    if device.type == "cuda":
        from inflight.kernels.triton.layer_ops import TritonLayerOps  # Triton is installed only on machines with a GPU

        return TritonLayerOps()
    kernels = load_kernels() if device.type == "cpu" and dtype in DTYPES else None
    return TorchLayerOps() if kernels is None else CpuLayerOps(kernels)


def select_linear_method(
    device: torch.device,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
    quantization: str | None = None,
    group_size: int = 64,
) -> LinearMethod:
    """Returns the fastest method for the device. `quantization` is "int8", "int4" or "fp8" if float weights are quantized, else
    None. `out_dtype`: the dtype of results, by default `dtype`.

    Raises:
        ConfigError: the quantization needs a GPU, or kernels that are not installed.
    """
    if device.type == "cuda":
        from inflight.layers.gpu_linear import GpuLinear

        return GpuLinear(device, dtype, out_dtype or dtype, quantization=quantization, group_size=group_size)
    if quantization == "fp8":
        raise ConfigError(
            f"quantization='fp8' needs an NVIDIA GPU, and this is a {device.type}: use int8 or int4, or leave it out"
        )
    kernels = load_kernels() if device.type == "cpu" and dtype in DTYPES else None
    if kernels is not None:
        bits = None if quantization is None else {"int8": 8, "int4": 4}[quantization]
        return KernelLinear(kernels, dtype, bits=bits, group_size=group_size)
    if quantization is not None:
        raise ConfigError(
            f"quantization={quantization!r} needs the C++ kernels, which cannot be used here (the warning above says why): "
            "leave it out, or install the kernels"
        )
    return PlainLinear(dtype)
