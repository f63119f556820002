"""`parse_architecture`: config.json -> `ModelArchitecture`. It refuses unsupported fields that would change the result.

The reference is Hugging Face transformers. Fields that do not change the result there are ignored. A field of another family
that would change the result in that family is refused (`families/family.py`), even if transformers ignores it in this one. A
missing size is an error (exceptions have a comment). Other missing fields have the default value of transformers' config class.
"""

from collections.abc import Mapping

from inflight.config.architecture import ModelArchitecture
from inflight.config.families import ENCODERS, FAMILIES, TRANSFORMERS_VISION, VISION_FAMILIES
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields
from inflight.config.json_fields import JsonFields
from inflight.config.pooler import base_and_end

_ALL = (*FAMILIES, *ENCODERS)
_VISION = {family.architecture: family for family in (*VISION_FAMILIES, *TRANSFORMERS_VISION)}
SUPPORTED_ARCHITECTURES = (*(family.architecture for family in _ALL), *_VISION)
BY_ARCHITECTURE = {name: family for family in _ALL for name in (family.architecture, *family.others)}
_BY_BASE = {base_and_end(family.architecture)[0]: family for family in FAMILIES}


def parse_architecture(config: Mapping[str, object], *, language_model_only: bool = False) -> ModelArchitecture:
    """The network that a parsed config.json describes. `language_model_only`: without its tower for images.

    Raises:
        UnsupportedModelError: the family or its variant is not supported, or a field has an impossible value.
    """
    fields = FamilyFields(config)
    names = _architecture_names(fields)
    family = next((found for name in names if (found := family_of(name)) is not None), None)
    vision = next((_VISION[name] for name in names if name in _VISION), None)
    if family is None and vision is not None:
        return vision.specify(config, language_model_only=language_model_only)
    if family is None:
        raise fields.refusal(f"{', '.join(names)} is not supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}")
    return family.specify(fields)


def is_known_family(config: Mapping[str, object]) -> bool:
    """Whether Inflight's own code supports the model's family. `parse_architecture` may still refuse this variant of it."""
    fields = FamilyFields(config)
    names = _architecture_names(fields)
    return any(name in _VISION or family_of(name) is not None for name in names)


def family_of(name: str) -> Family | None:
    """The family of a class of transformers. It may also be one without a head for text: LlamaModel, or
    LlamaForSequenceClassification. Gemma3Text... and Qwen3_5Text... are the parts for text of models with images."""
    if name in BY_ARCHITECTURE:
        return BY_ARCHITECTURE[name]
    base, end = base_and_end(name)
    return _BY_BASE.get(base) or _BY_BASE.get(base.removesuffix("Text")) if end else None


def _architecture_names(fields: JsonFields) -> tuple[str, ...]:
    of_type = {family.model_type: family.architecture for family in _ALL}
    of_type |= {family.model_type: name for name, family in _VISION.items()}
    model_type = fields.text("model_type", "unknown")  # a config that was saved without weights has no names
    return fields.name_or_names("architectures") or (of_type.get(model_type, f"model_type {model_type}"),)
