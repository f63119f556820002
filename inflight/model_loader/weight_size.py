"""`weight_bytes`: how many bytes the weights of a model need. Computed before a weight is read."""

from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from inflight.config.engine import ModelConfig, QuantizationConfig
from inflight.config.weight_format import becomes_floats
from inflight.config.weight_room import Beside, smaller_formats
from inflight.layers.linear import Linear
from inflight.layers.vocab import LogitsHead
from inflight.models.causal_lm import CausalLM

_SCALE_BYTES, _GROUP_BYTES = 4, 4  # a row has one float32 scale; a group has a scale and an offset in half precision
_SMALLEST = QuantizationConfig(layers="int4", head="int4", group_size=128)  # that is assumed for quantized checkpoints
_SMALLEST_BITS = 4 + 8 * _GROUP_BYTES / _SMALLEST.group_size  # of a weight, with its part of the scales
_PART_OF_KNOWN = 0.9


@dataclass(frozen=True)
class WeightSizes:
    """How many bytes the weights need.

    Attributes:
        rank: those of one rank.
        whole: those of all pipeline stages, but only the part of one tensor-parallel rank.
        beside: which of `whole` are experts, and how many bytes the weights would have in other formats.
    """

    rank: int
    whole: int
    beside: Beside = field(default_factory=Beside)


def weight_sizes(
    model: CausalLM, whole: CausalLM, config: ModelConfig, stored_bits: float | None = None
) -> WeightSizes:
    """`model`: one stage; `whole`: all stages. `stored_bits`: `WeightSource.bits_in_memory`."""
    forms = {
        name: replace(config, quantization=QuantizationConfig(layers=name, head="int8"))
        for name in smaller_formats(config.quantization.layers)
        if _becomes_floats(config)
    }
    groups = [unit for prefix, unit in whole.load_units() if prefix.endswith(".experts")]
    experts = sum(weight_bytes(group, config, stored_bits) for group in groups)
    return WeightSizes(
        rank=weight_bytes(model, config, stored_bits),
        whole=weight_bytes(whole, config, stored_bits),
        beside=Beside(experts, {name: weight_bytes(whole, form) for name, form in forms.items()}),
    )


def _becomes_floats(config: ModelConfig) -> bool:
    floats = config.load_format == "dummy" or becomes_floats(config.architecture.weight_format)
    return floats and config.load_format != "gguf"


def weight_bytes(model: nn.Module, config: ModelConfig, stored_bits: float | None = None) -> int:
    """The bytes of the weights of `model` (one rank's part), which has been made, but not loaded.

    Linear weights of a quantized checkpoint count as 4 bits each, the smallest size that is supported. So a model that fits is
    never refused. If more is known (`stored_bits`), they count as 90 % of this: one rank may have more of the smaller ones.
    """
    kinds = config.quantization if _becomes_floats(config) else _SMALLEST
    total = sum(weight.nbytes for weight in model.parameters())
    if stored_bits is not None and config.quantization.layers is None:  # otherwise stored floats may become smaller
        linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, Linear))
        total += int(linear * max(0.0, _PART_OF_KNOWN * stored_bits - _SMALLEST_BITS) / 8)
    for module in model.modules():
        if isinstance(module, Linear) and not module.keeps_floats:
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
