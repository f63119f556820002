"""`merge_overrides`: config.json with the fields of `hf_overrides`. A field is found under each of its spellings.

Transformers 4 writes the rotary embedding into `rope_theta` and `rope_scaling`, transformers 5 into `rope_parameters`, in some
families with an object for each kind of layer. Families have different names for sizes. Models that also read images have the
fields of their part for text in `text_config`. An override may use any spelling, whatever the file uses.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

from inflight.config.families.vision_family import FIELDS_OUTSIDE
from inflight.config.parse_rope import SCALING_FIELDS
from inflight.config.unknown_family import SIZE_NAMES
from inflight.errors import UnsupportedModelError

Fields = Mapping[str, object]
_T = TypeVar("_T")

_ROPES = ("rope_parameters", "rope_scaling")
_FULL = "full_attention"
_SLIDING = "sliding_attention"
_ALSO_IN_ROPE = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
_LOCAL_THETA = "rope_local_base_freq"  # of layers with a window
_SYNONYMS = (
    ("dtype", "torch_dtype"),
    ("tie_word_embeddings", "tie_embedding"),
    ("intermediate_size", "block_ff_dim"),
    ("rms_norm_eps", "norm_eps"),
)
_OF_THE_WHOLE = ("architectures", "model_type", "auto_map")  # of a model that also reads images


def merge_overrides(config: Fields, overrides: Fields) -> dict[str, object]:
    """Nested objects are merged field by field. A rotary embedding of another kind replaces the file's: only its theta, and
    what is no part of the scaling, stays."""
    text = config.get("text_config")
    of_text = overrides.get("text_config")
    nested = of_text if isinstance(of_text, Mapping) else {}
    flat = {name: value for name, value in overrides.items() if name != "text_config"}
    if not isinstance(text, Mapping):
        return _merge(config, {**nested, **flat})
    outside = {
        name: value
        for name, value in flat.items()
        if name in (*_OF_THE_WHOLE, *FIELDS_OUTSIDE) or _spellings(config, name)
    }
    outside |= {name: value for name, value in nested.items() if name in FIELDS_OUTSIDE}
    inside = {
        name: value
        for name, value in flat.items()
        if name not in _OF_THE_WHOLE and (name not in outside or _spellings(text, name))
    }
    return {**_merge(config, outside), "text_config": _merge(text, {**inside, **nested})}


def ineffective_overrides(config: Fields, overrides: Fields, describe: Callable[[Fields], _T]) -> list[str]:
    """The names of `overrides` that change config.json, but not what `describe` makes of it."""
    merged = merge_overrides(config, overrides)
    text = overrides.get("text_config")
    nested = text if isinstance(text, Mapping) else {}
    without = {
        name: {key: value for key, value in overrides.items() if key != name}
        for name in overrides
        if not nested or name != "text_config"
    } | {
        f"text_config.{name}": {
            **overrides,
            "text_config": {key: value for key, value in nested.items() if key != name},
        }
        for name in nested
    }
    described = describe(merged)
    found = []
    for name, others in without.items():
        before = merge_overrides(config, others)
        try:
            if before != merged and describe(before) == described:
                found.append(name)
        except UnsupportedModelError:
            continue  # the model needs this override
    return found


def _merge(config: Fields, overrides: Fields) -> dict[str, object]:
    merged = dict(config)
    for name in sorted(overrides, key=lambda name: name not in _ROPES):  # a theta beside the objects counts
        value = overrides[name]
        if name in _ROPES:
            _merge_rope(merged, name, value)
        elif name in (*_ALSO_IN_ROPE, _LOCAL_THETA):
            _set_in_rope(merged, name, value)
        else:
            for spelling in _spellings(config, name) or [name]:
                own = config.get(spelling)
                is_nested = isinstance(own, Mapping) and isinstance(value, Mapping)
                merged[spelling] = _merge(own, value) if is_nested else value  # type: ignore[arg-type]
    return merged


def _spellings(config: Fields, name: str) -> list[str]:
    """The names under which `config` has this field."""
    if name in (*_ROPES, *_ALSO_IN_ROPE, _LOCAL_THETA):
        return [each for each in (*_ROPES, name) if each in config]
    synonyms = next((names for names in _SYNONYMS if name in names), (name,))
    if found := [each for each in synonyms if each in config]:
        return found
    sizes = next((names for names in SIZE_NAMES.values() if name in names), ())
    return [each for each in sizes if isinstance(config.get(each), int)]


def _merge_rope(merged: dict[str, object], name: str, value: object) -> None:
    held = {each: rope for each in _ROPES if isinstance(rope := merged.get(each), Mapping)}
    if isinstance(value, Mapping) and _is_by_layer(value) and not any(map(_is_by_layer, held.values())):
        merged.pop("rope_scaling", None)
        merged["rope_parameters"] = value
        return
    for each in held or [name]:
        merged[each] = _merged_rope(held.get(each, {}), value) if held or isinstance(value, Mapping) else value
    if isinstance(value, Mapping):
        merged |= {field: value[field] for field in _ALSO_IN_ROPE if field in value and field in merged}


def _merged_rope(own: Fields, value: object) -> object:
    """`value`: null means that nothing is scaled."""
    if not isinstance(value, Mapping | None):
        return value  # it is refused
    if _is_by_layer(own):
        changes = value if value is not None and _is_by_layer(value) else {_FULL: value}
        parts = {name: part if isinstance(part := own.get(name), Mapping) else {} for name in changes}
        return {**own, **{name: _merged_rope(parts[name], change) for name, change in changes.items()}}
    kind = None if value is None else value.get("rope_type", value.get("type"))
    if value is None or (kind is not None and kind != own.get("rope_type", own.get("type", "default"))):
        own = {name: field for name, field in own.items() if name not in SCALING_FIELDS}
    if value is None:
        return {**own, "rope_type": "default"}
    kept = own if kind is None else {name: field for name, field in own.items() if name not in ("rope_type", "type")}
    return {**kept, **value}


def _set_in_rope(merged: dict[str, object], name: str, value: object) -> None:
    is_set = False
    for each in _ROPES:
        rope = merged.get(each)
        if not isinstance(rope, Mapping):
            continue
        layers, field = (_SLIDING, "rope_theta") if name == _LOCAL_THETA else (_FULL, name)
        if _is_by_layer(rope):
            own = part if isinstance(part := rope.get(layers), Mapping) else {}
            if field == "rope_theta" or field in own:
                merged[each] = {**rope, layers: {**own, field: value}}
                is_set = True
        elif name != _LOCAL_THETA and (name in rope or (name == "rope_theta" and each == "rope_parameters")):
            merged[each] = {**rope, name: value}
            is_set = True
    if name in merged or not is_set:
        merged[name] = value


def _is_by_layer(rope: Fields) -> bool:
    """Whether there is an object for each kind of layer."""
    return any(isinstance(part, Mapping) for part in rope.values())
