"""`with_separate_quantization`: config.json with the `quantization_config` that old tools wrote into a file of its own.

AutoGPTQ wrote `quantize_config.json`, AutoAWQ `quant_config.json`, NVIDIA's ModelOpt `hf_quant_config.json`, before they wrote
`quantization_config` into config.json.
"""

from pathlib import Path
from typing import Any

from inflight.errors import UnsupportedModelError
from inflight.hub import read_json

FILES = ("quantize_config.json", "quant_config.json")
_MODEL_OPT = "hf_quant_config.json"
_FIELD = "quantization_config"
_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}  # AutoAWQ's name -> the name in config.json
_OF_GPTQ = ("desc_act", "sym", "damp_percent")
_OF_AWQ = ("zero_point", "version")
# If config.json and the file both have one of these, they must agree.
_COMPARED = ("quant_method", "bits", "group_size", "zero_point", "version", "checkpoint_format")


def with_separate_quantization(config: dict[str, Any], folder: Path) -> dict[str, Any]:  # Any: JSON
    """
    Raises:
        ConfigError: a file cannot be read.
        UnsupportedModelError: a file names no method, or one that is not read, or contradicts config.json.
    """
    if config.get(_FIELD) is None and (folder / _MODEL_OPT).is_file():
        return {**config, _FIELD: _read_model_opt(folder / _MODEL_OPT)}
    for path in (folder / name for name in FILES):
        if not path.is_file():
            continue
        found = _read(path)
        own = config.get(_FIELD)
        if own is None:
            config = {**config, _FIELD: found}
        elif isinstance(own, dict):
            _compare(path, found, own)
    return config


def _read_model_opt(path: Path) -> dict[str, Any]:
    fields = read_json(path).get("quantization")
    if not isinstance(fields, dict):
        raise UnsupportedModelError(f"{path} has no object quantization, which says how the weights are quantized")
    return {"quant_method": "modelopt", **fields}


def _read(path: Path) -> dict[str, Any]:
    fields = {_NAMES.get(name, name): value for name, value in read_json(path).items()}
    if fields.get("quant_method") is None:
        method = next(
            (method for method, names in (("gptq", _OF_GPTQ), ("awq", _OF_AWQ)) if {*names} & {*fields}), None
        )
        if method is None:
            raise UnsupportedModelError(
                f"{path} does not say by which method the weights are quantized; add quant_method (gptq or awq) to it, or "
                f"{_FIELD} to config.json"
            )
        fields["quant_method"] = method
    return fields


def _compare(path: Path, found: dict[str, Any], own: dict[str, Any]) -> None:
    for name in _COMPARED:
        one = found.get(name)
        other = own.get(name)
        if one is not None and other is not None and str(one).lower() != str(other).lower():
            raise UnsupportedModelError(
                f"{path} has {name}={one!r}, but {_FIELD} of config.json has {name}={other!r}; remove the one that is wrong"
            )
