"""`weight_bytes`: how many bytes the weights of a model need. Computed before a weight is read."""

from dataclasses import dataclass, replace

from torch import Tensor

from inflight.config.engine import ModelConfig, QuantizationConfig
from inflight.config.weight_format import PLAIN
from inflight.layers.linear import Linear
from inflight.layers.vocab import LogitsHead
from inflight.models.causal_lm import CausalLM

_SCALE_BYTES, _GROUP_BYTES = 4, 4  # a row has one float32 scale; a group has a scale and an offset in half precision
_SMALLEST = QuantizationConfig(layers="int4", head="int4", group_size=128)  # that is assumed for quantized checkpoints


@dataclass(frozen=True)
class WeightSizes:
    """How many bytes the weights need.

    Attributes:
        rank: those of one rank.
        whole: those of all pipeline stages, but only the part of one tensor-parallel rank.
        int4: the same as `whole` with quantization="int4"; None if the weights are quantized already.
    """

    rank: int
    whole: int
    int4: int | None = None


def weight_sizes(model: CausalLM, whole: CausalLM, config: ModelConfig) -> WeightSizes:
    """`model`: one stage; `whole`: all stages."""
    is_quantized = config.quantization.layers == "int4" or not _is_plain(config)
    in_int4 = replace(config, quantization=QuantizationConfig(layers="int4", head="int8"))
    return WeightSizes(
        rank=weight_bytes(model, config),
        whole=weight_bytes(whole, config),
        int4=None if is_quantized else weight_bytes(whole, in_int4),
    )


def _is_plain(config: ModelConfig) -> bool:
    is_plain = config.load_format == "dummy" or config.architecture.weight_format == PLAIN
    return is_plain and config.load_format != "gguf"


def weight_bytes(model: CausalLM, config: ModelConfig) -> int:
    """The bytes of the weights of `model` (one rank's part), which has been made, but not loaded.

    Linear weights of a quantized checkpoint count as 4 bits each, the smallest size that is supported. So a model that fits is
    never refused.
    """
    kinds = config.quantization if _is_plain(config) else _SMALLEST
    total = sum(weight.nbytes for weight in model.parameters())
    for module in model.modules():
        if isinstance(module, Linear):
            total += _quantized_bytes(module.weight, kinds.layers, kinds.group_size) - module.weight.nbytes
        elif isinstance(module, LogitsHead):
            table = module.table.weight
            total -= 0 if module.is_tied else table.nbytes
            if not module.is_tied or config.quantization.head is not None:  # otherwise the embedding's table is counted
                total += _quantized_bytes(table, kinds.head, kinds.group_size)
    return total


def _quantized_bytes(weight: Tensor, quantization: str | None, group_size: int) -> int:
    """weight: [out_features, in_features], perhaps without memory."""
    out_features, in_features = weight.shape
    if quantization is None:
        return weight.nbytes
    if quantization == "int4":
        return out_features * (in_features // 2 + in_features // group_size * _GROUP_BYTES)
    return out_features * (in_features + _SCALE_BYTES)  # "int8", "fp8"
