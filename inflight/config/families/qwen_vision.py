"""What the families of Qwen that read images have in common: fields of their towers, and the three positions of a token."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inflight.config.architecture import ModelArchitecture
from inflight.config.families.family_fields import FamilyFields
from inflight.config.families.vision_family import check_heads, tower_activation
from inflight.config.json_fields import JsonFields
from inflight.config.mixers import RopeConfig
from inflight.errors import UnsupportedModelError

GGUF_SECTIONS = ("rope.dimension_sections", "rope.dimension_count", "n_deepstack_layers")  # keys about images
_ROPES = ("rope_scaling", "rope_parameters")
_SECTIONS = ("mrope_section", "mrope_interleaved")


def without_sections(fields: FamilyFields) -> FamilyFields:
    """The fields without those of the three positions. A text is rotated without them."""
    found = {}
    for name in _ROPES:
        rope = fields.values.get(name)
        if isinstance(rope, dict):
            kept = {key: value for key, value in rope.items() if key not in _SECTIONS}
            for key in ("type", "rope_type"):
                if kept.get(key) == "mrope":
                    kept[key] = "default"
            found[name] = kept
    return fields.with_values(found)


def with_sections(
    fields: FamilyFields, rope: RopeConfig | None, head_dim: int, default: tuple[int, int, int], *, is_interleaved: bool
) -> RopeConfig:
    """The same rotary embedding, with the numbers of frequencies of each of the three positions.

    Args:
        default: if config.json does not name them, these are the numbers.
        is_interleaved: see `RopeConfig`.
    """
    assert rope is not None, "the families have one"
    given = fields.mapping(next((name for name in _ROPES if fields.has(name)), _ROPES[0]))
    given = fields if fields.has(_SECTIONS[0]) else given  # of a GGUF file
    sections = _integers(given, "mrope_section", default)
    if len(sections) != 3 or max(sections) > head_dim:
        raise given.refusal(f"mrope_section={list(sections)!r} is not a list of three numbers of frequencies")
    num_frequencies = (rope.rotary_dim or head_dim) // 2
    if not is_interleaved and sum(sections) != num_frequencies:
        raise given.refusal(
            f"mrope_section={list(sections)!r} has not the sum {num_frequencies}, half of a head's size"
        )
    return replace(rope, mrope_section=sections, mrope_interleaved=is_interleaved)


def sections_from_gguf(given: Mapping[str, object]) -> dict[str, object]:
    """The fields of config.json from the keys of the part for text in a GGUF file, which has no vision tower."""
    sections = given.get("rope.dimension_sections")
    found: dict[str, object] = {"vision_config": None}
    if (
        isinstance(sections, list) and len(sections) == 4 and sections[3] == 0
    ):  # frames, rows, columns, and an unused one
        found["mrope_section"] = sections[:3]
    elif sections is not None:
        raise UnsupportedModelError(
            f"the GGUF file's key rope.dimension_sections={sections!r} is not supported; three numbers and 0 are"
        )
    return found


def tower_fields(config: JsonFields, model: ModelArchitecture, activation: str, **defaults: int) -> dict[str, Any]:
    """The fields of `QwenVisionSpec`, from config.json. `defaults` are values of fields that it does not have."""
    tower = config.mapping("vision_config")
    hidden_size = tower.integer("hidden_size", defaults["hidden_size"])
    num_heads = tower.integer("num_heads", 16)
    check_heads(tower, hidden_size, num_heads, 4)
    out_size = tower.integer("out_hidden_size", defaults["out_hidden_size"])
    if out_size != model.hidden_size:
        raise tower.refusal(
            f"out_hidden_size={out_size} is not the hidden_size of the part for text, {model.hidden_size}"
        )
    return {
        "image_token_id": config.integer("image_token_id", defaults["image_token_id"], least=0),
        "out_size": out_size,
        "hidden_size": hidden_size,
        "num_layers": tower.integer("depth", defaults["depth"]),
        "num_heads": num_heads,
        "mlp_size": tower.integer("intermediate_size", defaults["intermediate_size"]),
        "merge_size": tower.integer("spatial_merge_size", 2),
        "patch_size": tower.integer("patch_size", defaults["patch_size"]),
        "num_frames": tower.integer("temporal_patch_size", 2),
        "num_channels": tower.integer("in_channels", 3),
        "rope_theta": tower.mapping("rope_parameters").number("rope_theta", 10000.0),
        "activation": tower_activation(tower, activation),
    }


def layer_numbers(tower: JsonFields, name: str, default: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """A field with numbers of layers of the tower."""
    given = _integers(tower, name, default)
    if len(set(given)) != len(given) or max(given, default=0) >= num_layers:
        raise tower.refusal(
            f"{name}={list(given)!r} is not a list of different layers of the tower, which has {num_layers}"
        )
    return given


def _integers(fields: JsonFields, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """A list of integers that are not negative."""
    given = fields.values.get(name, default)
    numbers = [each for each in given if type(each) is int and each >= 0] if isinstance(given, (list, tuple)) else []
    if not isinstance(given, (list, tuple)) or len(numbers) != len(given):
        raise fields.refusal(f"{name}={given!r} is not a list of integers of at least 0")
    return tuple(numbers)
