"""Parts of transformers' models that Inflight's kernels compute faster: RMS norms, and MLPs with a gate.

Which modules these are is tried, not read from their names: a copy with small random weights must give the known result.
"""

import copy
import inspect
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from inflight.config.architecture import GELU_TANH, SILU, GatedMlpSpec
from inflight.kernels.gate import ACTIVATIONS
from inflight.layers.context import LayerContext
from inflight.layers.gated_mlp import GatedMLP
from inflight.models.transformers_fallback.adapters import Adapter, NormAdapter, replace_module

# (in_features, out_features) of the linear layers in the trial copy
_WIDTHS = {"gate_proj": (8, 16), "up_proj": (8, 16), "down_proj": (16, 8)}


def replace_norms(model: PreTrainedModel, context: LayerContext) -> None:
    for name, module in list(model.named_modules()):
        if (eps := _eps_of_norm(module, context)) is not None:
            replace_module(model, name, NormAdapter(module.weight, eps, context.ops))


def _eps_of_norm(module: nn.Module, context: LayerContext) -> float | None:
    """The number that an RMSNorm adds; None if the module computes something else."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weights = dict(module.named_parameters())
    if not isinstance(eps, float) or set(weights) != {"weight"} or list(module.buffers()):
        return None
    if len(inspect.signature(module.forward).parameters) > 1:  # some norms also take a gate
        return None
    weight = weights["weight"]
    if weight.dim() != 1 or weight.dtype != context.dtype:
        return None
    twin = copy.copy(module)
    generator = torch.Generator().manual_seed(0)
    drawn = partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
    values = drawn(len(weight))
    twin._parameters = {"weight": nn.Parameter(values, False)}
    x = 1e-2 * drawn(3, len(weight))  # inputs so small that eps changes the result
    wanted = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * values
    return eps if _gives(twin, x, wanted) else None


def replace_mlps(model: PreTrainedModel, layers: str, context: LayerContext) -> None:
    """Gives the decoder layers Inflight's MLPs with a gate, which are divided among the ranks."""
    for name, module in list(model.named_modules()):
        spec = _describe_mlp(module, context) if name.startswith(f"{layers}.") else None
        if spec is not None and spec.size % context.tp.size == 0:
            replace_module(model, name, Adapter(GatedMLP(module.gate_proj.in_features, spec, context)))


def _describe_mlp(module: nn.Module, context: LayerContext) -> GatedMlpSpec | None:
    """None if the module is not an MLP with a gate."""
    linears = _linears(module)
    has_others = any(child not in linears.values() and list(child.parameters()) for child in module.children())
    if linears.keys() != _WIDTHS.keys() or has_others or list(module.named_parameters(recurse=False)):
        return None
    biases = {child.bias is not None for child in linears.values()}
    if len(biases) > 1 or any(child.weight.dtype != context.dtype for child in linears.values()):
        return None
    x, (gate, up, down) = _draw()
    twin = _twin(module, gate, up, down)
    for activation in (SILU, GELU_TANH):
        if _gives(twin, x, (ACTIVATIONS[activation](x @ gate.T) * (x @ up.T)) @ down.T):
            return GatedMlpSpec(size=linears["up_proj"].out_features, bias=biases.pop(), activation=activation)
    return None


def needs_whole_width(module: nn.Module) -> bool:
    """Whether a module is an MLP with a gate that ranks must not divide, because its result is not the sum of the results of
    its parts. An example is an MLP that keeps the largest of all values of a token (Gemma 3n)."""
    if not _WIDTHS.keys() <= _linears(module).keys():
        return False
    x, (gate, up, down) = _draw()
    half = len(gate) // 2
    parts = [slice(0, half), slice(half, None)]
    try:
        with torch.no_grad():
            wanted = _twin(module, gate, up, down)(x)
            found = [_twin(module, gate[part], up[part], down[:, part])(x) for part in parts]
    except Exception:  # the module needs other inputs
        return False
    return not torch.allclose(sum(found), wanted, rtol=1e-4, atol=1e-5)


def _linears(module: nn.Module) -> dict[str, nn.Linear]:
    return {name: child for name, child in module.named_children() if type(child) is nn.Linear}


def _draw() -> tuple[Tensor, list[Tensor]]:
    """Inputs for a trial, and weights for the linear layers in `_WIDTHS`."""
    drawn = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
    weights = [drawn(out, width) for width, out in _WIDTHS.values()]
    sizes = torch.tensor([0.1, 1.0, 100.0], dtype=torch.float64, device="cpu")  # some MLPs clamp large values
    return drawn(1, 3, 8) * sizes[:, None], weights


def _twin(module: nn.Module, *weights: Tensor) -> nn.Module:
    """A copy of an MLP, with these weights in the linear layers in `_WIDTHS`."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    for name, weight in zip(_WIDTHS, weights, strict=True):
        twin._modules[name] = linear = nn.Linear(
            weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype, device="meta"
        )
        linear.weight = nn.Parameter(weight, False)
    return twin


def _gives(module: nn.Module, x: Tensor, wanted: Tensor) -> bool:
    try:
        with torch.no_grad():
            found = module(x)
    except Exception:  # the module needs other inputs or other weights
        return False
    return (
        isinstance(found, Tensor)
        and found.shape == wanted.shape
        and torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)
    )
