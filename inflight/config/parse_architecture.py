"""`parse_architecture`: config.json -> `ModelArchitecture`. It refuses unsupported fields that would change the result.

The reference is Hugging Face transformers. Fields that do not change the result there are ignored. A field of another family
that would change the result in that family is refused (`families/family.py`), even if transformers ignores it in this one. A
missing size is an error (exceptions have a comment). Other missing fields have the default value of transformers' config class.
"""

from collections.abc import Mapping

from inflight.config.architecture import ModelArchitecture
from inflight.config.families import FAMILIES
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields
from inflight.config.json_fields import JsonFields

SUPPORTED_ARCHITECTURES = tuple(family.architecture for family in FAMILIES)
BY_ARCHITECTURE = {family.architecture: family for family in FAMILIES}
_WRAPPERS = dict(family.wrapper for family in FAMILIES if family.wrapper is not None)  # architecture -> model_type
# A model that also reads images has the fields of its part for text in the object text_config, except for these.
FIELDS_OUTSIDE = ("dtype", "torch_dtype", "eos_token_id", "quantization_config", "tie_word_embeddings")


def parse_architecture(config: Mapping[str, object]) -> ModelArchitecture:
    """The network that a parsed config.json describes.

    Raises:
        UnsupportedModelError: the family or its variant is not supported, or a field has an impossible value.
    """
    fields = FamilyFields(config)
    names = _architecture_names(fields)
    family = next((BY_ARCHITECTURE[name] for name in names if name in BY_ARCHITECTURE), None)
    wrapper = next((name for name in names if name in _WRAPPERS), None)
    if family is None and wrapper is not None:
        text = fields.mapping("text_config")
        family = _family_within(wrapper, text)
        outside = {name: value for name in FIELDS_OUTSIDE if (value := config.get(name)) is not None}
        fields = FamilyFields({**text.values, **outside}, text.where)
    if family is None:
        raise fields.refusal(f"{', '.join(names)} is not supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}")
    return family.specify(fields)


def _family_within(wrapper: str, text: JsonFields) -> Family:
    """The family of the part for text of a model that also reads images."""
    families = [family for family in FAMILIES if family.wrapper is not None and family.wrapper[0] == wrapper]
    model_type = text.text("model_type", families[0].model_type)
    for family in families:
        if family.model_type == model_type:
            return family
    raise text.refusal(
        f"model_type={model_type!r} is not supported in {wrapper}; supported are "
        f"{', '.join(family.model_type for family in families)}"
    )


def is_known_family(config: Mapping[str, object]) -> bool:
    """Whether Inflight's own code supports the model's family. `parse_architecture` may still refuse this variant of it."""
    fields = FamilyFields(config)
    names = _architecture_names(fields)
    return any(name in _WRAPPERS or name in BY_ARCHITECTURE for name in names)


def _architecture_names(fields: JsonFields) -> tuple[str, ...]:
    of_type = {family.model_type: family.architecture for family in FAMILIES}
    of_type |= {model_type: name for name, model_type in _WRAPPERS.items()}
    model_type = fields.text("model_type", "unknown")  # a config that was saved without weights has no names
    return fields.name_or_names("architectures") or (of_type.get(model_type, f"model_type {model_type}"),)
