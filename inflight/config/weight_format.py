"""config.json's `quantization_config` -> the name of the format in which the checkpoint stores linear weights.

A format is refused if the engine cannot read it, or would compute other results with it. Bits, group sizes and the list of
quantized modules are not read here. The loader derives them from the tensors of each module.
"""

from typing import TypeVar

from inflight.config.json_fields import JsonFields

Value = TypeVar("Value", str, int, bool)

PLAIN = "plain"
GPTQ = "gptq"
GPTQ_V2 = "gptq_v2"
AWQ = "awq"
COMPRESSED_TENSORS = "compressed-tensors"
FP8 = "fp8"
FBGEMM_FP8 = "fbgemm_fp8"
COMPRESSED_FP8 = "compressed-tensors in fp8"
MXFP4 = "mxfp4"
GGUF = "gguf"

_FP8_FORMATS = (FP8, FBGEMM_FP8, COMPRESSED_FP8)
MAY_HAVE_FP8 = (*_FP8_FORMATS, COMPRESSED_TENSORS)  # the groups of compressed-tensors may have several formats

# Values of the option `quantization` that name a checkpoint's format, as in other engines -> the format. The "_marlin" in a
# value names kernels of other engines and has no effect: the device decides which kernels are used.
STORED_QUANTIZATIONS = {
    "awq": AWQ,
    "awq_marlin": AWQ,
    "gptq": GPTQ,
    "gptq_marlin": GPTQ,
    "compressed-tensors": COMPRESSED_TENSORS,
    "fbgemm_fp8": FBGEMM_FP8,
    "mxfp4": MXFP4,
    "gguf": GGUF,
}
# The variants of a format: which of them a checkpoint has, only its files say.
GENERAL_FORMATS = {GPTQ_V2: GPTQ, COMPRESSED_FP8: COMPRESSED_TENSORS}

_BITS = (4, 8)
_MODEL_OPT_ALGORITHMS = ("fp8", "fp8_per_channel_per_token")  # one scale for a weight, or one for each row
_READ = (
    "supported are gptq (4 and 8 bits), awq (4 bits, version gemm), compressed-tensors (pack-quantized and int-quantized, 4 "
    "and 8 bits; float-quantized, 8 bits), fp8 (e4m3), fbgemm_fp8, modelopt (FP8), mxfp4 and GGUF files; use one of these, or "
    "the plain checkpoint that it was made from"
)
_MIXED = "mixed-precision"
_FLOAT_FORMAT = "float-quantized"
_COMPRESSED_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", _FLOAT_FORMAT)


def parse_weight_format(config: JsonFields) -> str:
    """The format, such as GPTQ; PLAIN if the weights are not quantized.

    Raises:
        UnsupportedModelError: the method, or this variant of it, cannot be read.
    """
    if not config.has("quantization_config"):
        return PLAIN
    fields = config.mapping("quantization_config")
    method = fields.text("quant_method").lower()
    if method == "gptq":
        return _gptq(fields)
    if method == "awq":
        _check(fields, "bits", (4,))
        _check_group_size(fields)
        name = "version" if fields.has("version") else "format"
        _check(fields, name, ("gemm",), default="gemm")
        return AWQ
    if method == "compressed-tensors":
        return _compressed_tensors(fields)
    if method == "fp8":
        _check(fields, "fmt", ("e4m3",), default="e4m3")
        _check(fields, "scale_fmt", ("float", "ue8m0"), default="float")
        return FP8
    if method == "modelopt":
        _check(fields, "quant_algo", _MODEL_OPT_ALGORITHMS)
        return FP8
    if method == "fbgemm_fp8":
        return FBGEMM_FP8
    if method == "mxfp4":
        return MXFP4
    raise fields.refusal(f"quant_method={method!r} is not supported; {_READ}")


def becomes_floats(weight_format: str) -> bool:
    """Whether all weights are floats in memory, unless they are quantized while they are read."""
    return weight_format == PLAIN or weight_format in _FP8_FORMATS


def is_fp8(weight_format: str) -> bool:
    """Whether linear weights are stored in fp8."""
    return weight_format in _FP8_FORMATS


def parse_weight_blocks(config: JsonFields) -> tuple[int, int] | None:
    """The rows and columns of a block of a weight that has one scale in fp8. None if no weight has blocks.

    Raises:
        UnsupportedModelError: the field is no pair of positive integers, or weights have blocks of several sizes.
    """
    if not config.has("quantization_config"):
        return None
    fields = config.mapping("quantization_config")
    if fields.has("weight_block_size"):
        return _block(fields, "weight_block_size")
    groups = fields.mapping("config_groups")
    weights = [groups.mapping(name).mapping("weights") for name in groups.values]
    found = {_block(each, "block_structure") for each in weights if each.has("block_structure")}
    if len(found) > 1:
        raise groups.refusal(f"block_structure has several values, {sorted(found)}; one for all weights is supported")
    return next(iter(found), None)


def _block(fields: JsonFields, name: str) -> tuple[int, int]:
    value = fields.values[name]
    if isinstance(value, (list, tuple)) and len(value) == 2:
        rows, columns = value
        are_integers = type(rows) is int and type(columns) is int
        if are_integers and rows > 0 and columns > 0:
            return rows, columns
    raise fields.refusal(f"{name}={value!r} is not supported; it should be two positive integers, such as [128, 128]")


def _gptq(fields: JsonFields) -> str:
    _check(fields, "bits", _BITS)
    _check_group_size(fields)
    if fields.boolean("is_marlin_format", False):
        raise fields.refusal(f"is_marlin_format=True is not supported; {_READ}")
    name = "checkpoint_format" if fields.has("checkpoint_format") else "format"
    return _check(fields, name, (GPTQ, GPTQ_V2), default=GPTQ)


def _compressed_tensors(fields: JsonFields) -> str:
    layout = _check(fields, "format", (*_COMPRESSED_FORMATS, _MIXED))
    # "frozen" says that the scales are final. How a weight is stored, the loader sees in its tensors.
    _check(fields, "quantization_status", ("compressed", "frozen"), default="compressed")
    _check(fields.mapping("sparsity_config"), "format", ("dense",), default="dense")
    groups = fields.mapping("config_groups")
    if not groups.values:
        raise fields.refusal("config_groups is missing; it says how weights are quantized")
    default = _FLOAT_FORMAT if layout == _FLOAT_FORMAT else _COMPRESSED_FORMATS[0]
    layouts = {_check_group(groups.mapping(name), default) for name in groups.values}
    is_fp8 = layouts == {_FLOAT_FORMAT}
    # In fp8 the engine's dtype takes the place of what is quantized beside weights, and is more exact.
    for name in ("transform_config",) if is_fp8 else ("kv_cache_scheme", "transform_config"):
        if fields.values.get(name):
            raise fields.refusal(f"{name}={fields.values[name]!r} is not supported; it would change the result")
    return COMPRESSED_FP8 if is_fp8 else COMPRESSED_TENSORS


def _check_group(group: JsonFields, default: str) -> str:
    """Returns the format of the weights of a group. `default`: the format if the group names none."""
    layout = _check(group, "format", _COMPRESSED_FORMATS, default=default)
    if group.has("output_activations"):
        raise group.refusal(f"output_activations is not supported; {_READ}")
    weights = group.mapping("weights")
    if layout == _FLOAT_FORMAT:
        _check_scheme(weights, "float", strategies=("tensor", "channel", "block"), bits=(8,), dynamic=False)
        return layout
    _check_scheme(weights, "int", strategies=("group", "channel", "tensor"), bits=_BITS, dynamic=False)
    # In W8A8 and W4A8 models, activations are quantized, too. The engine does not read stored scales of activations. So a
    # model is accepted only if their scales are computed for each token.
    if group.has("input_activations"):
        activations = group.mapping("input_activations")
        _check_scheme(activations, "int", strategies=("token",), bits=(8,), dynamic=True)
    return layout


def _check_scheme(
    fields: JsonFields, kind: str, *, strategies: tuple[str, ...], bits: tuple[int, ...], dynamic: bool
) -> None:
    _check(fields, "type", (kind,))
    _check(fields, "num_bits", bits)
    _check(fields, "strategy", strategies)
    _check(fields, "dynamic", (dynamic,), default=False)
    _check_group_size(fields)


def _check_group_size(fields: JsonFields) -> None:
    """The loader takes the size of groups from the tensors, because modules may have others. So only what is no size at all is
    refused."""
    value = fields.values.get("group_size")
    if value is not None and (type(value) is not int or value < -1 or value == 0):
        raise fields.refusal(
            f"group_size={value!r} is not supported; it should be a positive integer, or -1 for one group in a row"
        )


def _check(fields: JsonFields, name: str, allowed: tuple[Value, ...], *, default: Value | None = None) -> Value:
    """The field's value, if it is allowed. The comparison ignores upper and lower case."""
    value = fields.values.get(name)
    value = default if value is None else value.lower() if isinstance(value, str) else value
    for known in allowed:
        if value == known and type(value) is type(known):
            return known
    raise fields.refusal(f"{name}={fields.values.get(name)!r} is not supported; {_READ}")
