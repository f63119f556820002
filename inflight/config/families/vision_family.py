"""`VisionFamily`: how the config.json of a family of models that read images becomes a `ModelArchitecture`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from inflight.config.architecture import GELU, GELU_TANH, RELU, SILU, ModelArchitecture
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields
from inflight.config.json_fields import JsonFields
from inflight.config.vision import VisionSpec

# These fields are outside of the object text_config, which has the other fields of the part for text.
FIELDS_OUTSIDE = ("dtype", "torch_dtype", "eos_token_id", "quantization_config", "tie_word_embeddings")
_ACTIVATIONS = {"silu": SILU, "gelu": GELU, "gelu_pytorch_tanh": GELU_TANH, "gelu_new": GELU_TANH, "relu": RELU}


@dataclass(frozen=True, kw_only=True)
class VisionFamily:
    """A family of models that read images: one file of this folder, and an entry in `families.VISION_FAMILIES`.

    `texts` are the families of the part for text. If config.json has no text_config, the fields of the first of them are at its
    top level. `tower` is the kind of the tower; `read_tower` makes its specification from the whole config.json, for the given
    decoder, or returns None if this model has no tower. `unread` and `renames`: see `ModelArchitecture`. `text_defaults`:
    model_type of a part for text -> the fields that text_config may leave out.
    """

    architecture: str
    model_type: str
    texts: tuple[Family, ...]
    tower: type[VisionSpec]
    read_tower: Callable[[JsonFields, ModelArchitecture], VisionSpec | None]
    unread: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    text_defaults: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    def specify(self, config: Mapping[str, object], *, language_model_only: bool = False) -> ModelArchitecture:
        """`language_model_only`: without the tower, whose fields are not read.

        Raises:
            UnsupportedModelError: a field has an impossible value, or a value that is not supported.
        """
        whole = FamilyFields(config)
        family, fields = text_part(whole, self.texts, self.architecture, self.text_defaults)
        model = family.specify(fields)
        # a model for text alone leaves the whole tower unread
        unread = tuple(name for name in model.unread if not name.startswith(self.tower.prefixes))
        model = replace(
            model, name=self.architecture, unread=(*unread, *self.unread), renames=(*model.renames, *self.renames)
        )
        is_for_text = language_model_only or whole.is_null("vision_config")
        vision = None if is_for_text else self.read_tower(whole, model)
        if vision is None:
            return replace(model, unread=(*model.unread, *self.tower.prefixes))
        if vision.image_token_id >= model.vocab_size:
            raise whole.refusal(
                f"the placeholder of images is the token {vision.image_token_id}, but vocab_size={model.vocab_size}"
            )
        return replace(model, vision=vision)


def without_vision(model: ModelArchitecture) -> ModelArchitecture:
    """The same model for text alone. The weights of its tower are left unread."""
    if model.vision is None:
        return model
    return replace(model, vision=None, unread=(*model.unread, *model.vision.prefixes))


def text_part(
    whole: FamilyFields,
    families: tuple[Family, ...],
    architecture: str,
    defaults: Mapping[str, Mapping[str, object]] = MappingProxyType({}),
) -> tuple[Family, FamilyFields]:
    """The part for text of a model that also reads images: which of the families it is, and its fields. `defaults`: see
    `VisionFamily.text_defaults`."""
    if not whole.has("text_config"):
        return families[0], whole
    text = whole.mapping("text_config")
    model_type = text.text("model_type", families[0].model_type)
    family = next((family for family in families if family.model_type == model_type), None)
    if family is None:
        known = ", ".join(family.model_type for family in families)
        raise text.refusal(f"model_type={model_type!r} is not supported in {architecture}; supported are {known}")
    outside = {name: value for name in FIELDS_OUTSIDE if (value := whole.values.get(name)) is not None}
    return family, FamilyFields({**defaults.get(model_type, {}), **text.values, **outside}, text.where)


def tower_activation(tower: JsonFields, default: str, *, name: str = "hidden_act") -> str:
    """The activation of a tower, which is the field `name`."""
    found = tower.text(name, default)
    if found not in _ACTIVATIONS:
        raise tower.refusal(f"{name}={found!r} is not supported; supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[found]


def check_heads(tower: JsonFields, hidden_size: int, num_heads: int, multiple: int) -> None:
    """Refuses heads whose size is no multiple of `multiple`."""
    if hidden_size % (num_heads * multiple):
        raise tower.refusal(
            f"hidden_size={hidden_size} cannot be divided into {num_heads} heads whose size is a multiple of {multiple}"
        )


def siglip_fields(tower: JsonFields, **defaults: int) -> dict[str, Any]:
    """The fields of `SiglipSpec` that belong to the tower alone. `defaults` are values of fields that are absent."""
    hidden_size = tower.integer("hidden_size", defaults["hidden_size"])
    num_heads = tower.integer("num_attention_heads", defaults["num_attention_heads"])
    check_heads(tower, hidden_size, num_heads, 1)
    image_size = tower.integer("image_size", 224)
    patch_size = tower.integer("patch_size", defaults["patch_size"])
    if image_size < patch_size:
        raise tower.refusal(f"image_size={image_size} is less than patch_size={patch_size}")
    return {
        "hidden_size": hidden_size,
        "num_layers": tower.integer("num_hidden_layers", 12),
        "num_heads": num_heads,
        "mlp_size": tower.integer("intermediate_size", 3072),
        "patch_size": patch_size,
        "num_channels": tower.integer("num_channels", 3),
        "positions_per_side": image_size // patch_size,
        "eps": tower.number("layer_norm_eps", 1e-6),
        "activation": tower_activation(tower, "gelu_pytorch_tanh"),
    }
