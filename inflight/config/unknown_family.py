"""`describe_model`: config.json -> `ModelArchitecture`, also for families that only transformers knows.

Of a family that only transformers knows, the engine needs a few sizes before the model is loaded. Families have different names
for them. Everything else is read by transformers, in `models/transformers_fallback/`.
"""

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from inflight.config.architecture import TRANSFORMERS, GatedMlpSpec, LayerSpec, ModelArchitecture
from inflight.config.families.expert_fields import check_experts
from inflight.config.families.family_fields import parse_dtype
from inflight.config.families.transformers_vision import tower_beside
from inflight.config.gguf_config import in_terms_of_gguf
from inflight.config.json_fields import JsonFields
from inflight.config.mixers import AttentionSpec
from inflight.config.parse_architecture import SUPPORTED_ARCHITECTURES, is_known_family, parse_architecture
from inflight.config.weight_format import parse_weight_blocks, parse_weight_format
from inflight.errors import ImpossibleFieldError, UnsupportedModelError

# Our name of a size -> the names that families have for it. The first name that is in the file counts.
SIZE_NAMES = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim", "model_dim"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "layers_block_type"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "max_position_embeddings": tuple(
        "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length seq_length max_target_positions".split()
    ),
    "intermediate_size": ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "decoder_ffn_dim"),
}
# If the file names no longest sequence, the model has none: its positions are computed, or it has no positions.
_LENGTH_WITHOUT_LIMIT = 8192
# Encoders: types of transformers in which each token sees all others. Of all others a token sees those before it.
_ENCODERS = frozenset(
    """electra ernie roberta-prelayernorm xlm-roberta-xl data2vec-text xmod jina_embeddings_v3 bert-generation roc_bert
    splinter""".split()
)
# ... whose positions begin behind the number of the padding token
_POSITIONS_BEHIND_PADDING = frozenset("roberta-prelayernorm xlm-roberta-xl data2vec-text xmod".split())
_HEAD_DIM_MULTIPLE = 16  # shorter heads are padded, because the C++ attention kernel needs such a multiple


def describe_model(
    config: Mapping[str, object],
    model_impl: str,
    *,
    gguf: Path | None = None,
    device: str = "cpu",
    language_model_only: bool = False,
) -> ModelArchitecture:
    """The model that a parsed config.json describes.

    `language_model_only`: without its vision tower.

    `model_impl`: "inflight", "transformers", or "auto" for Inflight's own code if it supports the model on `device` ("cpu" or
    "cuda"), and transformers' code if it does not. `gguf`: the GGUF file that the fields were made from. Only Inflight's own
    code reads it.

    Raises:
        UnsupportedModelError: the model cannot be computed in this way, or a field has an impossible value.
    """
    is_own = model_impl == "inflight" or (model_impl == "auto" and is_known_family(config))
    if not is_own:
        return _describe_unknown_family(config, language_model_only=language_model_only)
    try:
        architecture = parse_architecture(config, language_model_only=language_model_only)
    except UnsupportedModelError as error:
        if gguf is not None:
            raise UnsupportedModelError(in_terms_of_gguf(str(error), gguf, config)) from error
        if model_impl == "inflight":
            raise UnsupportedModelError(
                f"{error}; with model_impl='transformers' (--model-impl) transformers' code may compute it"
            ) from error
        if isinstance(error, ImpossibleFieldError):
            raise
        try:
            found = _describe_unknown_family(config, language_model_only=language_model_only)
        except UnsupportedModelError:
            raise error from None
        return replace(found, not_native=str(error))
    if model_impl == "inflight" or gguf is not None or device == "cpu":
        return architecture
    return _of_transformers_on_gpu(config, architecture)


def _of_transformers_on_gpu(config: Mapping[str, object], architecture: ModelArchitecture) -> ModelArchitecture:
    """The model as transformers' code computes it on GPUs, if Inflight's own code cannot and transformers' can."""
    parts = [part for layer in architecture.layers for part in (layer.mixer, layer.mlp)]
    reason = next((part.only_on_cpu for part in parts if part.only_on_cpu), None)
    if reason is None or not any(part.by_transformers_on_gpu for part in parts):
        return architecture
    try:
        found = _describe_unknown_family(config, language_model_only=architecture.vision is None)
    except UnsupportedModelError:
        return architecture
    return replace(found, not_native=f"{architecture.name} has {reason}")


def native_refusal(architecture: ModelArchitecture) -> str:
    """For the end of a message that transformers' code does not compute a model: why Inflight's own does not."""
    if not architecture.not_native:
        return ""
    return (
        ". model_impl='auto' (--model-impl) chose transformers' code, because Inflight's own does not compute the model: "
        f"{architecture.not_native}"
    )


def _describe_unknown_family(config: Mapping[str, object], *, language_model_only: bool = False) -> ModelArchitecture:
    name = (
        ", ".join(JsonFields(config).name_or_names("architectures"))
        or f"model_type {config.get('model_type', 'unknown')}"
    )
    if find_spec("transformers") is None:
        raise UnsupportedModelError(
            f"config.json: {name} is none of Inflight's own families; transformers may know it: run pip install "
            f"'inflight-llm[transformers]'. Inflight's own are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    if config.get("is_encoder_decoder") is True:
        raise UnsupportedModelError(
            f"config.json: {name} has an encoder; only models that are one decoder are supported"
        )
    text = config.get("text_config")
    fields = JsonFields({**config, **text} if isinstance(text, Mapping) else config)
    check_experts(fields)
    num_heads = _size(fields, "num_heads", 1)
    hidden_size = _size(fields, "hidden_size")
    head_dim = fields.integer("head_dim", max(1, hidden_size // num_heads))
    model_type = fields.text("model_type", "")
    is_encoder = model_type in _ENCODERS and not fields.boolean("is_decoder", False)
    longest = _size(fields, "max_position_embeddings", _LENGTH_WITHOUT_LIMIT)
    if model_type in _POSITIONS_BEHIND_PADDING:
        longest -= fields.integer("pad_token_id", 1, least=0) + 1
    layer = LayerSpec(
        mixer=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=_size(fields, "num_kv_heads", num_heads),
            head_dim=-(-head_dim // _HEAD_DIM_MULTIPLE) * _HEAD_DIM_MULTIPLE,
            rope=None,
            is_causal=not is_encoder,
        ),
        mlp=GatedMlpSpec(size=_size(fields, "intermediate_size", 4 * hidden_size)),
    )
    architecture = ModelArchitecture(
        name=name,
        implementation=TRANSFORMERS,
        vocab_size=_size(fields, "vocab_size"),
        hidden_size=hidden_size,
        layers=(layer,) * _size(fields, "num_layers"),
        rms_norm_eps=1e-6,
        max_position_embeddings=longest,
        has_head=not is_encoder,
        dtype=parse_dtype(fields),
        weight_format=parse_weight_format(fields),
        weight_blocks=parse_weight_blocks(fields),
        eos_token_ids=fields.token_ids("eos_token_id"),
    )
    return architecture if language_model_only else replace(architecture, vision=tower_beside(config, architecture))


def _size(fields: JsonFields, name: str, default: int | None = None) -> int:
    found = next((theirs for theirs in SIZE_NAMES[name] if fields.has(theirs)), None)
    if found is None and default is None:
        raise fields.refusal(f"{name} is missing; families call it {', '.join(SIZE_NAMES[name])}")
    found = found or SIZE_NAMES[name][0]
    value = fields.values.get(found)
    if isinstance(value, (list, tuple)) and value:  # a size of each layer, or the kind of each
        fields = JsonFields({found: len(value) if isinstance(value[0], str) else max(value)}, fields.where)
    return fields.integer(found, default)
