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

GGUF = "gguf"

# Values of the option `quantization` that name a checkpoint's format, as in other engines -> the format. The "_marlin" in a
# value names kernels of other engines and has no effect: the device decides which kernels are used.
STORED_QUANTIZATIONS = {
    "awq": AWQ,
    "awq_marlin": AWQ,
    "gptq": GPTQ,
    "gptq_marlin": GPTQ,
    "compressed-tensors": COMPRESSED_TENSORS,
    "gguf": GGUF,
}

_BITS = (4, 8)
_READ = (
    "supported are gptq (4 and 8 bits), awq (4 bits, version gemm), compressed-tensors (pack-quantized and int-quantized, 4 "
    "and 8 bits) and GGUF files; use one of these, or the plain checkpoint that it was made from"
)
_COMPRESSED_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "mixed-precision")


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
        name = "version" if fields.has("version") else "format"
        _check(fields, name, ("gemm",), default="gemm")
        return AWQ
    if method == "compressed-tensors":
        _check_compressed_tensors(fields)
        return COMPRESSED_TENSORS
    raise fields.refusal(f"quant_method={method!r} is not supported; {_READ}")


def _gptq(fields: JsonFields) -> str:
    _check(fields, "bits", _BITS)
    if fields.boolean("is_marlin_format", False):
        raise fields.refusal(f"is_marlin_format=True is not supported; {_READ}")
    name = "checkpoint_format" if fields.has("checkpoint_format") else "format"
    return _check(fields, name, (GPTQ, GPTQ_V2), default=GPTQ)


def _check_compressed_tensors(fields: JsonFields) -> None:
    _check(fields, "format", _COMPRESSED_FORMATS)
    # "frozen" says that the scales are final. How a weight is stored, the loader sees in its tensors.
    _check(fields, "quantization_status", ("compressed", "frozen"), default="compressed")
    _check(fields.mapping("sparsity_config"), "format", ("dense",), default="dense")
    for name in ("kv_cache_scheme", "transform_config"):
        if fields.values.get(name):
            raise fields.refusal(f"{name}={fields.values[name]!r} is not supported; it would change the result")
    groups = fields.mapping("config_groups")
    if not groups.values:
        raise fields.refusal("config_groups is missing; it says how weights are quantized")
    for name in groups.values:
        group = groups.mapping(name)
        _check(group, "format", _COMPRESSED_FORMATS[:-1], default=_COMPRESSED_FORMATS[0])
        _check_scheme(group.mapping("weights"), strategies=("group", "channel", "tensor"), bits=_BITS, dynamic=False)
        # In W8A8 and W4A8 models, activations are quantized, too. The engine does not read stored scales of activations. So a
        # model is accepted only if their scales are computed for each token.
        if group.has("input_activations"):
            _check_scheme(group.mapping("input_activations"), strategies=("token",), bits=(8,), dynamic=True)
        if group.has("output_activations"):
            raise group.refusal(f"output_activations is not supported; {_READ}")


def _check_scheme(fields: JsonFields, *, strategies: tuple[str, ...], bits: tuple[int, ...], dynamic: bool) -> None:
    _check(fields, "type", ("int",))
    _check(fields, "num_bits", bits)
    _check(fields, "strategy", strategies)
    _check(fields, "dynamic", (dynamic,), default=False)


def _check(fields: JsonFields, name: str, allowed: tuple[Value, ...], *, default: Value | None = None) -> Value:
    """The field's value, if it is allowed. The comparison ignores upper and lower case."""
    value = fields.values.get(name)
    value = default if value is None else value.lower() if isinstance(value, str) else value
    for known in allowed:
        if value == known and type(value) is type(known):
            return known
    raise fields.refusal(f"{name}={fields.values.get(name)!r} is not supported; {_READ}")
