"""Translates the metadata of a GGUF file into the config.json of the same model.

Keys and tensor names are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and of llama.cpp's converter.
"""

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from inflight.config.families import ENCODERS, FAMILIES, VISION_FAMILIES
from inflight.config.families.family import ROPE_FREQUENCIES, TENSORS, Family
from inflight.config.gguf_experts import check_experts
from inflight.config.gguf_file import EMBEDDING, GgufFile, GgufStrings, read_part
from inflight.config.gguf_mmproj import with_mmproj
from inflight.config.gguf_parts import read_gguf
from inflight.config.gguf_pooling import LABELS, POOLING_TYPE, pooling_fields
from inflight.config.separate_quantization import with_separate_quantization
from inflight.config.stored_dtype import with_stored_dtype
from inflight.errors import CheckpointError
from inflight.hub import read_config

_HEAD = "output.weight"
_OF_VISION = {vision.architecture: vision.texts[0] for vision in VISION_FAMILIES}
_ONLY_OF_VISION = [family for family in _OF_VISION.values() if family not in FAMILIES]
_FAMILIES = [family for family in (*FAMILIES, *ENCODERS, *_ONLY_OF_VISION) if family.gguf_name is not None]

# Keys without the architecture's name ("context_length" for "llama.context_length") -> fields of config.json
_FIELDS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
}
# Other keys that are accepted: functions below read them, or they do not change the result of these architectures.
_OTHER_FIELDS = """
    vocab_size attention.value_length attention.layer_norm_epsilon attention.causal pooling_type
    rope.dimension_count rope.scaling.type rope.scaling.factor rope.scaling.original_context_length rope.scaling.finetuned
    rope.scale_linear tensor_data_layout
""".split()
# Keys -> the values with which they change nothing
_NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0,),
    "expert_weights_scale": (0, 1),
    "expert_weights_norm": (True,),  # families whose config.json says it read the key
    "expert_gating_func": (0, 1),  # a softmax
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "leading_dense_block_count": (0,),
}
ROPE_FACTORS = f"{ROPE_FREQUENCIES}.weight"
# Architectures of files that are not read -> why, and what works instead
_NOT_READ = {
    "gemma-embedding": "of EmbeddingGemma only the model's folder is supported, such as google/embeddinggemma-300m: many GGUF "
    "files lack the two dense layers behind its pooling, and without them the vectors are wrong"
}
_LONG_FACTORS = ("rope_factors_long", "rope_factors_short")
FACTORS = (ROPE_FACTORS, *(f"{name}.weight" for name in _LONG_FACTORS))
# The rotary embedding of Llama 3.1 and later. A GGUF file does not contain these numbers. It contains one divisor for each
# frequency, which its converter has computed from these numbers and the scaling factor.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_FACTOR_TOLERANCE = 1e-4  # largest relative difference between a divisor in the file and the computed one


def read_model_config(path: Path, max_model_len: int | None = None, mmproj: Path | None = None) -> dict[str, object]:
    """The config.json of a model folder, or the equivalent for a GGUF file. If config.json does not have them, it gets the
    quantization that old tools wrote beside it, and the dtype of the weights. A GGUF file that names no longest sequence gets
    `max_model_len`. `mmproj`: the file for images that belongs to a GGUF file.

    Raises:
        ConfigError: there is no config.json, it cannot be read, or the GGUF file holds a model that is not supported.
    """
    if not path.is_file():
        return with_stored_dtype(with_separate_quantization(read_config(path), path), path)
    file = read_gguf(path)
    config = gguf_config(file)
    if mmproj is not None:
        config = with_mmproj(config, file, read_part(mmproj))
    longest = {} if max_model_len is None else {_FIELDS["context_length"]: max_model_len}
    return {**longest, **config}


def in_terms_of_gguf(problem: str, path: Path, config: Mapping[str, object]) -> str:
    """A message about the fields of config.json, for a GGUF file: it names the file and its keys instead."""
    names = config.get("architectures")
    named = names if isinstance(names, list) else []
    family = next((each for each in _FAMILIES if each.architecture in named), None)
    family = family or next((_OF_VISION[name] for name in named if name in _OF_VISION), None)
    problem = problem.replace("config.json", str(path))
    own = {} if family is None else family.gguf_names
    for key, field in {**_FIELDS, **own}.items():
        if family is not None and re.search(rf"\b{field}\b", problem):
            also = " or max_model_len (--max-model-len)" if key == "context_length" else ""
            problem += (
                f"; {field} is the file's key {family.gguf_name}.{key}, and can be given with hf_overrides "
                f"(--hf-overrides '{{\"{field}\": ...}}'){also}"
            )
    return problem


def gguf_config(file: GgufFile) -> dict[str, object]:
    """Makes the fields of a config.json from the file's metadata and tensors.

    Raises:
        UnsupportedModelError: the architecture or a field is not supported.
        CheckpointError: the file does not have the embedding, or its head is for another vocabulary.
    """
    _refuse_other_kinds(file)
    _check_vocabulary(file)
    family = gguf_family(file)
    prefix = f"{family.gguf_name}."
    keys = (*family.gguf_names, *family.gguf_keys)
    per_layer = {f"{prefix}{key}" for key in keys}
    own_keys = [key for key in file.metadata if key.startswith(prefix) and key != f"{prefix}{LABELS}"]
    given = {key.removeprefix(prefix): _plain(file, key, per_layer) for key in own_keys}
    given |= {name: _factors(file, name, keys) for name in _LONG_FACTORS if f"{name}.weight" in file.tensors}
    if ROPE_FREQUENCIES in keys and ROPE_FACTORS in file.tensors:
        given[ROPE_FREQUENCIES] = _factors(file, ROPE_FREQUENCIES, keys)
    unread = {key: value for key, value in given.items() if key not in keys}
    check_experts(file, prefix, given)
    _refuse_unserved_fields(file, prefix, unread, given.get("context_length"))
    config = {name: given[key] for key, name in _FIELDS.items() if key in given}
    config |= {
        "architectures": [family.architecture],
        "vocab_size": file.tensors[EMBEDDING].shape[0] if EMBEDDING in file.tensors else None,
        "tie_word_embeddings": _HEAD not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "dtype": _dtype(file),
        "eos_token_id": _eos_token_ids(file),
    }
    if family in ENCODERS:
        types = file.tensors.get("token_types.weight")
        config["type_vocab_size"] = 0 if types is None else types.shape[0]
    if "use_qk_norm" in family.reads:  # the file has no key for it
        config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in file.tensors
    _check_head_dim(file, prefix, unread, config)
    config["rope_scaling"] = _rope_scaling(file, prefix, given, config)
    of_file = {"attention.key_length": config["head_dim"], "vocab_size": config["vocab_size"], TENSORS: [*file.tensors]}
    return config | family.from_gguf(given | of_file) | pooling_fields(file, family, given.get(POOLING_TYPE))


def gguf_family(file: GgufFile) -> Family:
    """
    Raises:
        UnsupportedModelError: no family is called as the file says.
    """
    architecture = file.metadata.get("general.architecture")
    called_so = [family for family in _FAMILIES if family.gguf_name == architecture]
    if not called_so:
        names = dict.fromkeys(str(family.gguf_name) for family in _FAMILIES)
        reason = _NOT_READ.get(str(architecture), f"supported are {', '.join(names)}")
        raise file.refusal(f"general.architecture={architecture!r} is not supported; {reason}")
    num_experts = file.metadata.get(f"{architecture}.expert_count", 0)
    has_experts = isinstance(num_experts, int) and num_experts > 0
    gating = file.metadata.get(f"{architecture}.expert_gating_func")
    fitting = [family for family in called_so if family.gguf_has_experts == has_experts] or called_so
    return next((family for family in fitting if gating in family.gguf_gating), fitting[0])


def _refuse_other_kinds(file: GgufFile) -> None:
    """Refuses files that are no model."""
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise file.refusal(f"this is not a whole model: its general.type is {kind!r}")


def _check_vocabulary(file: GgufFile) -> None:
    embedding = file.tensors.get(EMBEDDING)
    head = file.tensors.get(_HEAD)
    if embedding is None and file.tensors:
        raise CheckpointError(f"{file.path} lacks {EMBEDDING}, whose rows are the vocabulary; download it again")
    if embedding is not None and head is not None and embedding.shape != head.shape:
        raise CheckpointError(
            f"{file.path}: {EMBEDDING} has shape {list(embedding.shape)}, and {_HEAD} {list(head.shape)}; "
            "they should be the same"
        )


def _factors(file: GgufFile, name: str, keys: tuple[str, ...]) -> list[float]:
    if name not in keys or file.tensors[f"{name}.weight"].type.name != "F32":
        raise file.refusal(f"{name}.weight is not supported; it could change the result")
    values: list[float] = file.map_tensor(f"{name}.weight")[0].view("<f4").tolist()
    return values


def _plain(file: GgufFile, key: str, per_layer: Collection[str]) -> object:
    """The value of a key as JSON. An array of equal numbers, one for each layer, becomes one number. Those of `per_layer` may
    have different numbers."""
    value = file.metadata[key]
    if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
        return value[0].item()
    if isinstance(value, np.ndarray) and key in per_layer:
        return value.tolist()
    if isinstance(value, np.ndarray | GgufStrings):
        raise file.refusal(f"{key} is an array of different values, which is not supported")
    return value


def _refuse_unserved_fields(file: GgufFile, prefix: str, unread: Mapping[str, object], context: object) -> None:
    for key, value in unread.items():
        neutral = key in _FIELDS or key in _OTHER_FIELDS
        if key == "attention.sliding_window":  # a window as long as the context has no effect
            neutral = isinstance(value, int) and isinstance(context, int) and (value == 0 or value >= context)
        elif key in _NEUTRAL_VALUES:
            neutral = any(
                value == each and isinstance(value, bool) == isinstance(each, bool) for each in _NEUTRAL_VALUES[key]
            )
        if not neutral:
            raise file.refusal(f"{prefix}{key}={value!r} is not supported; it could change the result")


def _check_head_dim(file: GgufFile, prefix: str, given: Mapping[str, object], config: dict[str, object]) -> None:
    """If the file has no key for head_dim, set it to hidden_size / number of heads. Refuse a file whose value heads or rotary
    embedding have another size."""
    if "head_dim" not in config:
        size = config.get("hidden_size")
        heads = config.get("num_attention_heads")
        if not (isinstance(size, int) and isinstance(heads, int) and heads > 0 and size % heads == 0):
            raise file.refusal(
                f"{prefix}embedding_length={size!r} and {prefix}attention.head_count={heads!r} give no head size"
            )
        config["head_dim"] = size // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        if given.get(key, config["head_dim"]) != config["head_dim"]:
            raise file.refusal(
                f"{prefix}{key}={given[key]!r} is not supported; it has to be the head size, {config['head_dim']}"
            )


def _dtype(file: GgufFile) -> str:
    """The dtype of the first layer's query projection, or MLP. If this is quantized: bfloat16, the usual dtype of a model
    before its quantization."""
    tensor = file.tensors.get("blk.0.attn_q.weight") or file.tensors.get("blk.0.ffn_down.weight")
    return {"F32": "float32", "F16": "float16"}.get(tensor.type.name if tensor else "", "bfloat16")


def _eos_token_ids(file: GgufFile) -> list[object]:
    """The tokens that end a text or a turn of a chat."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [file.metadata.get(f"tokenizer.ggml.{name}") for name in names]
    return list(dict.fromkeys(each for each in ids if isinstance(each, int)))


def _rope_scaling(
    file: GgufFile, prefix: str, given: Mapping[str, object], config: Mapping[str, object]
) -> dict[str, object] | None:
    kind = given.get("rope.scaling.type", "none")
    factor = given.get("rope.scaling.factor")
    if "rope.scale_linear" in given:  # the spelling of old files
        kind = "linear"
        factor = given["rope.scale_linear"]
    if ROPE_FACTORS in file.tensors and ROPE_FREQUENCIES not in given:
        if kind != "none":
            raise file.refusal(f"{prefix}rope.scaling.type={kind!r} together with {ROPE_FACTORS} is not supported")
        return _llama3_rope(file, config)
    if kind == "none" or (kind == "linear" and factor == 1):
        return None
    if kind == "yarn":
        original = given.get("rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    if kind != "linear":
        raise file.refusal(f"{prefix}rope.scaling.type={kind!r} is not supported; supported are none, linear and yarn")
    return {"rope_type": kind, "factor": factor}


def _llama3_rope(file: GgufFile, config: Mapping[str, object]) -> dict[str, object] | None:
    """The scaling of Llama 3, as an object `rope_scaling`. None if all divisors in the file are 1.

    Raises:
        UnsupportedModelError: no factor, together with `_LLAMA3_ROPE`, gives the divisors in the file.
    """
    tensor = file.tensors[ROPE_FACTORS]
    theta = config.get("rope_theta", 10000.0)
    head_dim = config["head_dim"]
    if not isinstance(head_dim, int):
        return None  # `parse_architecture` refuses it
    if (
        tensor.type.name == "F32"
        and tensor.shape == (head_dim // 2,)
        and isinstance(theta, float)
        and 1 < theta < math.inf
    ):
        divisors = file.map_tensor(ROPE_FACTORS)[0].view("<f4").astype(np.float64)
        if (divisors == 1).all():
            return None
        factor = float(divisors.max())
        wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
        low = _LLAMA3_ROPE["low_freq_factor"]
        high = _LLAMA3_ROPE["high_freq_factor"]
        kept = np.clip((_LLAMA3_ROPE["original_max_position_embeddings"] / wavelengths - low) / (high - low), 0, 1)
        is_scaled = 1 < factor < math.inf
        if is_scaled and np.allclose(divisors * ((1 - kept) / factor + kept), 1, rtol=0, atol=_FACTOR_TOLERANCE):
            return {"rope_type": "llama3", "factor": factor, **_LLAMA3_ROPE}
    raise file.refusal(
        f"{ROPE_FACTORS} is not the scaling of Llama 3 (frequency factors 1 and 4, 8192 original positions), the "
        "only one that is read from a GGUF file"
    )
