"""`describe_eagle`: config.json and headers of an EAGLE head -> `ModelArchitecture`.

Such a head is a layer that was trained for a served model, in a folder of its own. Files are read as the training programs
write them: those of EAGLE itself (arXiv:2401.15077, arXiv:2503.01840) and of SpecForge, and of vLLM's speculators, whose layer
has another name, and its fields another place in config.json.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from inflight.config.architecture import ModelArchitecture, NormNames
from inflight.config.hidden_inputs import HiddenInputsSpec
from inflight.config.json_fields import JsonFields
from inflight.config.parse_architecture import parse_architecture
from inflight.config.safetensors_file import StoredBytes, find_files, model_name, read_header
from inflight.config.speculative import EAGLE, EAGLE3
from inflight.errors import CheckpointError, ConfigError

# Classes that training programs write in config.json. A head may also have the name of its layer's family.
_NAMES = {
    EAGLE: ("EagleLlamaForCausalLM", "LlamaForCausalLMEagle"),
    EAGLE3: ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"),
}
_LAYER = "model.layers.0"
RENAMES = (("midlayer.", "layers.0."), ("model.layers.0.", "layers.0."), ("layers.0.", f"{_LAYER}."))
_TARGETS = "d2t"  # of each token of the head: the token's number minus the number that it has in the head
_UNREAD = (_TARGETS, "t2d", "model.embed_tokens.", "lm_head.", "verifier_norm.", "verifier_lm_head.")
# Fields that would change the result -> the only value that is supported
_ONLY: dict[str, object] = {"norm_before_fc": False, "norm_output": False, "fc_norm": False, "parallel_drafting": False}


def describe_eagle(
    config: Mapping[str, object], folder: Path, served: ModelArchitecture, method: str, *, is_dummy: bool
) -> ModelArchitecture:
    """
    Args:
        config: the parsed config.json.
        method: the one that the user asks for, "eagle" or "eagle3".
        is_dummy: the weights are random. Then nothing but config.json is read.

    Raises:
        ConfigError: it is a head of another kind, or for another model.
        UnsupportedModelError: a field of config.json has an impossible value.
    """
    fields = _layer_fields(JsonFields(config))
    stored = {} if is_dummy else _headers(folder)
    kind = _kind_of(fields, folder, stored)
    if kind != method:
        raise ConfigError(
            f"speculative_config: method={method!r}, but {folder} has a head of the kind {kind!r}; give method={kind!r}"
        )
    names = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False}
    model = parse_architecture({**fields.values, **names})
    if model.num_layers != 1:
        raise fields.refusal(f"num_hidden_layers={model.num_layers} is not supported; an EAGLE head has 1 layer")
    for name, only in _ONLY.items():
        if fields.values.get(name, only) != only:
            raise fields.refusal(f"{name}={fields.values[name]!r} is not supported; only {only!r} is")
    _check_same("vocab_size", "another vocabulary", folder, model.vocab_size, served)
    spec = (
        _read_eagle3(fields, model, served, stored)
        if kind == EAGLE3
        else HiddenInputsSpec(layer=_LAYER, projection="fc")
    )
    spec = replace(
        spec, has_bias="fc.bias" in stored, has_embedding=_has_embedding(model, served, stored, is_dummy=is_dummy)
    )
    if spec.head_size is None or not spec.has_embedding:
        _check_same("hidden_size", "another hidden size", folder, model.hidden_size, served)
    _check_stored(spec, model, served, folder, stored)
    norms = NormNames(before_attention=None)
    if kind == EAGLE3:
        norms = NormNames(before_attention="hidden_norm")
    return replace(
        model,
        name=fields.name_or_names("architectures")[0] if fields.has("architectures") else kind,
        layers=(replace(model.layers[0], norms=norms),),
        hidden_inputs=spec,
        renames=RENAMES,
        unread=_UNREAD,
    )


def kind_of_head(names: Collection[str]) -> str | None:
    """The method for which a model with such "architectures" is a head; None if it is a whole model, as far as they tell."""
    return next((kind for kind, known in _NAMES.items() if any(name in known for name in names)), None)


def read_targets(folder: Path, vocab_size: int) -> npt.NDArray[np.int64] | None:
    """The numbers that the tokens of a head have in the served model, [head_size]; None: the same.

    Raises:
        CheckpointError: the checkpoint gives a token a number that the served model does not have, or two tokens the same one.
    """
    stored = _headers(folder).get(_TARGETS)
    if stored is None:
        return None
    if stored.dtype not in ("I64", "I32"):
        raise CheckpointError(f"{stored.file}: {_TARGETS} is stored as {stored.dtype}; only I64 and I32 are supported")
    dtype = np.int64 if stored.dtype == "I64" else np.int32
    moved = np.fromfile(stored.file, dtype=dtype, count=stored.shape[0], offset=stored.start).astype(np.int64)
    targets = np.arange(len(moved), dtype=np.int64) + moved
    if targets.min(initial=0) < 0 or targets.max(initial=0) >= vocab_size or len(np.unique(targets)) < len(targets):
        raise CheckpointError(
            f"{stored.file}: {_TARGETS} gives tokens numbers from {targets.min()} to {targets.max()}, "
            f"{len(np.unique(targets))} different ones for {len(targets)} tokens; the served model has the tokens 0 to "
            f"{vocab_size - 1}, each once"
        )
    return targets


def _layer_fields(fields: JsonFields) -> JsonFields:
    """All fields in one object. vLLM's own files have those of the layer in `model`, and speculators in
    `transformer_layer_config`."""
    for nested in ("model", "transformer_layer_config"):
        if isinstance(fields.values.get(nested), Mapping):
            outer = {name: value for name, value in fields.values.items() if name not in (nested, "architectures")}
            inner = fields.mapping(nested).values
            names = fields.name_or_names("architectures") or JsonFields(inner).name_or_names("architectures")
            return fields.with_values({**inner, **outer, "architectures": list(names)})
    return fields


def _kind_of(fields: JsonFields, folder: Path, stored: Collection[str]) -> str:
    names = fields.name_or_names("architectures") or (fields.text("model_type", "unknown"),)
    found = kind_of_head(names)
    if found is not None:
        return found
    if names[0] not in ("LlamaForCausalLM", "llama"):
        known = ", ".join(name for of_kind in _NAMES.values() for name in of_kind)
        raise ConfigError(
            f"speculative_config: {folder} has a {names[0]}, which is no EAGLE head that Inflight knows; known are {known}"
        )
    is_eagle3 = fields.has("draft_vocab_size") or f"{_LAYER}.hidden_norm.weight" in stored
    return EAGLE3 if is_eagle3 else EAGLE


def _headers(folder: Path) -> dict[str, StoredBytes]:
    files, _ = find_files(folder)
    return {model_name(name, RENAMES): tensor for file in files for name, tensor in read_header(file).items()}


def _has_embedding(
    model: ModelArchitecture, served: ModelArchitecture, stored: Mapping[str, StoredBytes], *, is_dummy: bool
) -> bool:
    if is_dummy:
        return model.hidden_size != served.hidden_size
    return "model.embed_tokens.weight" in stored


def _read_eagle3(
    fields: JsonFields, model: ModelArchitecture, served: ModelArchitecture, stored: Mapping[str, StoredBytes]
) -> HiddenInputsSpec:
    size = fields.integer("draft_vocab_size", model.vocab_size)
    if not stored:
        head_size: int | None = size
    elif "lm_head.weight" in stored:
        head_size = stored["lm_head.weight"].shape[0]
    else:
        head_size = None
    captured = _captured(fields, served)
    return HiddenInputsSpec(
        layer=_LAYER,
        projection="fc",
        embedding_norm=f"{_LAYER}.input_layernorm",
        hidden_norm=f"{_LAYER}.hidden_norm",
        final_norm="model.norm",
        captured=captured,
        captured_size=len(captured) * served.hidden_size,
        norm_replaces=fields.boolean("norm_before_residual", False),
        head_size=head_size,
    )


def _captured(fields: JsonFields, served: ModelArchitecture) -> tuple[int, ...]:
    """The layers of the served model whose inputs the head reads, in rising order. SGLang and SpecForge count the layers whose
    outputs it reads."""
    count = served.num_layers
    name, chosen = "eagle_aux_hidden_state_layer_ids", fields.values.get("eagle_aux_hidden_state_layer_ids")
    shift = 0
    if chosen is None:
        nested = fields.mapping("eagle_config")
        name, shift = f"eagle_config: {name}", 1
        chosen = nested.values.get("eagle_aux_hidden_state_layer_ids")
        if nested.boolean("use_aux_hidden_state", True) is False:
            raise fields.refusal("eagle_config: use_aux_hidden_state=False is not supported; only true is")
    if chosen is None:
        name, shift, chosen = "its default", 0, [2, count // 2, count - 3]
    if not isinstance(chosen, list | tuple) or not chosen or not all(type(each) is int for each in chosen):
        raise fields.refusal(f"{name}={chosen!r} is not a list of numbers of layers")
    layers = sorted({each + shift for each in chosen})
    if len(layers) < len(chosen) or layers[0] < 0 or layers[-1] >= count:
        raise ConfigError(
            f"speculative_config: the EAGLE head reads the hidden states before the layers {layers} of the served model "
            f"({name} is {list(chosen)}), but {served.name} has the layers 0 to {count - 1}, and each can be read once; take "
            "a head for this model"
        )
    return tuple(layers)


def _check_same(field: str, what: str, folder: Path, size: int, served: ModelArchitecture) -> None:
    expected: int = getattr(served, field)
    if size != expected:
        raise ConfigError(
            f"speculative_config: the EAGLE head {folder} has {what} than the served model: {field}={size}, and {served.name} "
            f"has {expected}; take a head that was trained for this model"
        )


def _check_stored(
    spec: HiddenInputsSpec,
    model: ModelArchitecture,
    served: ModelArchitecture,
    folder: Path,
    stored: Mapping[str, StoredBytes],
) -> None:
    if not stored:
        return
    if missing := [part for part in spec.parts if not any(name.startswith(f"{part}.") for name in stored)]:
        raise ConfigError(
            f"speculative_config: {folder} lacks {', '.join(missing)}, which an EAGLE head of this kind has; it has "
            f"{', '.join(sorted(stored)[:8])}"
        )
    width = spec.captured_size or 2 * served.hidden_size
    if stored["fc.weight"].shape[-1:] != (width,):
        raise ConfigError(
            f"speculative_config: the EAGLE head {folder} has another hidden size than the served model: fc.weight has the "
            f"shape {list(stored['fc.weight'].shape)}, and {served.name} needs [{model.hidden_size}, {width}]; take a head "
            "that was trained for this model"
        )
    if spec.head_size is None and _TARGETS in stored:
        raise ConfigError(
            f"speculative_config: the EAGLE head {folder} has {_TARGETS}, the tokens of its lm_head, but no lm_head.weight; "
            "take complete files"
        )
    targets = stored[_TARGETS].shape if _TARGETS in stored else (served.vocab_size,)
    if spec.head_size is not None and targets != (spec.head_size,):
        raise ConfigError(
            f"speculative_config: the EAGLE head {folder} has another vocabulary than the served model: its lm_head has "
            f"{spec.head_size} tokens, but {'d2t has' if _TARGETS in stored else 'without d2t it needs'} {targets[0]}"
        )
