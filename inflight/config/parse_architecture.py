"""`parse_architecture`: config.json -> `ModelArchitecture`. It refuses unsupported fields that would change the result.

The reference is Hugging Face transformers. Fields that do not change the result there are ignored. A field of another family
that would change the result in that family is refused (`families/family.py`), even if transformers ignores it in this one. A
missing size is an error (exceptions have a comment). Other missing fields have the default value of transformers' config class.
"""

from __future__ import annotations

from collections.abc import Mapping

from inflight.config.architecture import ModelArchitecture
from inflight.config.families import FAMILIES
from inflight.config.families.family import Family
from inflight.config.json_fields import JsonFields
from inflight.errors import UnsupportedModelError

SUPPORTED_ARCHITECTURES = tuple(family.architecture for family in FAMILIES)


def parse_architecture(config: Mapping[str, object]) -> ModelArchitecture:
    """The network that a parsed config.json describes.

    Raises:
        UnsupportedModelError: the family or its variant is not supported, or a field has an impossible value.
    """
    fields = JsonFields(config)
    return _family_of(fields).specify(fields)


def is_known_family(config: Mapping[str, object]) -> bool:
    """Whether Inflight's own code supports the model's family. `parse_architecture` may still refuse this variant of it."""
    return any(name in SUPPORTED_ARCHITECTURES for name in _architecture_names(JsonFields(config)))


def _architecture_names(fields: JsonFields) -> tuple[str, ...]:
    of_type = {family.model_type: family.architecture for family in FAMILIES}
    model_type = fields.text("model_type", "unknown")  # a config that was saved without weights has no names
    return fields.texts("architectures") or (of_type.get(model_type, f"model_type {model_type}"),)


def _family_of(fields: JsonFields) -> Family:
    names = _architecture_names(fields)
    by_name = {family.architecture: family for family in FAMILIES}
    for name in names:
        if name in by_name:
            return by_name[name]
    raise UnsupportedModelError(
        f"config.json: {', '.join(names)} is not supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
    )
