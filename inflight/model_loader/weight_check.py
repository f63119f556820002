"""`check_weights`: compares the names, shapes and dtypes in a checkpoint's headers with those that the model needs."""

import re
from collections.abc import Collection

from inflight.errors import CheckpointError
from inflight.model_loader.stored_names import MissingNames
from inflight.model_loader.weight_source import StoredTensor, WeightSource
from inflight.models.causal_lm import CausalLM
from inflight.models.vision.tower import hint_at_tower

_FLOAT_DTYPES = ("BF16", "F16", "F32", "F64")
# Old transformers releases stored these tables, which are computed from config.json.
_OLD_BUFFER = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
# Names of tensors that quantized checkpoints have beside, or instead of, a weight.
_OF_QUANTIZED = re.compile(r"\.(qweight|weight_packed|weight_scale|weight_scale_inv|weight\.absmax)$")
_EXPERT = re.compile(r"\.experts\.([0-9]+)\.")
_MAX_NAMES_SHOWN = 8


def check_weights(source: WeightSource, model: CausalLM) -> list[str]:
    """Checks the tensors of `source` against `model`. Returns the tensors that the model does not need, and that the index of
    the checkpoint does not list. They are no part of it.

    Raises:
        CheckpointError: tensors are missing, extra, misshapen, or in an unsupported dtype.
    """
    slots = {name: slot for prefix, unit in model.load_units() for name, slot in unit.weight_slots(prefix)}
    missing = [name for name in slots if name not in source.tensors]
    extra = [
        name
        for name in source.tensors
        if name not in slots and not _OLD_BUFFER.search(name) and not model.leaves_unread(name)
    ]
    unlisted = [name for name in extra if name in source.unlisted]
    extra = [name for name in extra if name not in source.unlisted]
    if missing:
        files = {name: stored.file for name, stored in source.tensors.items()}
        hint = (
            hint_at_tower(missing, model.tower, files)
            or _hint_at_others(source, extra)
            or _hint_at_quantization(source)
        )
        hint += _number_of_experts(missing, source, slots)
        raise CheckpointError(f"the checkpoint lacks {list_names(_missing_in_files(source, missing))}{hint}")
    if extra:
        raise CheckpointError(
            f"the checkpoint has weights that {_config_of(source.tensors[extra[0]])} does not account for: "
            f"{list_names(_extra_in_files(source, extra, slots))} (in {source.tensors[extra[0]].file}); leaving them out would "
            f"change the result{_hint_at_quantization(source)}{_number_of_experts(extra, source, slots)}"
        )
    for name, slot in slots.items():
        stored = source.tensors[name]
        if stored.shape != slot.shape:
            raise CheckpointError(
                f"{stored.place(name)} has shape {list(stored.shape)}, but {_config_of(stored)} asks for {list(slot.shape)}"
            )
        if not stored.is_quantized and stored.dtype not in _FLOAT_DTYPES:
            raise CheckpointError(
                f"{stored.place(name)} is stored as {stored.dtype}; only {', '.join(_FLOAT_DTYPES)} are supported"
            )
    return unlisted


def _config_of(stored: StoredTensor) -> str:
    """What says which shapes the model has."""
    return "its metadata" if stored.file.suffix == ".gguf" else "config.json"


def _number_of_experts(names: list[str], source: WeightSource, slots: Collection[str]) -> str:
    """What the configuration says, if tensors of the last experts are missing, or of experts behind the last one too many."""
    indices = {int(found[1]) for found in map(_EXPERT.search, names) if found is not None}
    if not indices or 0 in indices:
        return ""
    needed = {int(found[1]) for found in map(_EXPERT.search, slots) if found is not None}
    config = _config_of(next(iter(source.tensors.values())))
    return f"; {config} says that a layer has {max(needed) + 1} experts" if needed else ""


def _missing_in_files(source: WeightSource, missing: list[str]) -> list[str]:
    """The names in the files of what is missing. If it is a part of a tensor that is there, its own name is added."""
    names = MissingNames(source)
    there = {tensor.stored_name for tensor in source.tensors.values()}
    found: dict[str, None] = {}
    for name in missing:
        stored = names.find(name)
        found[f"{name} of {stored}" if stored in there else stored] = None
    return list(found)


def _extra_in_files(source: WeightSource, extra: list[str], needed: Collection[str]) -> list[str]:
    """The same of what the model does not need."""
    used = {tensor.stored_name for name, tensor in source.tensors.items() if name in needed}
    found: dict[str, None] = {}
    for name in extra:
        stored = source.tensors[name].stored_name
        found[f"{name} of {stored}" if stored in used else stored] = None
    return list(found)


def _hint_at_others(source: WeightSource, extra: list[str]) -> str:
    names = list(dict.fromkeys(source.tensors[name].stored_name for name in extra))
    is_quantized = any(_OF_QUANTIZED.search(name) for name in names)
    return f"; the model does not know {list_names(names)}, which it has" if names and not is_quantized else ""


def _hint_at_quantization(source: WeightSource) -> str:
    found = next((name for name in source.tensors if _OF_QUANTIZED.search(name)), None)
    return (
        ""
        if found is None
        else f". The checkpoint seems to be quantized ({found}), but no quantization_config in config.json says how"
    )


def list_names(names: list[str]) -> str:
    """Formats a list of names for a message: the first names, and the number of the others."""
    more = len(names) - _MAX_NAMES_SHOWN
    return ", ".join(names[:_MAX_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
