"""SmolLM3: Llama's layers. Every fourth layer has no rotary embedding."""

from dataclasses import replace

from inflight.config.architecture import LayerSpec, ModelArchitecture
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields


def _parse(fields: FamilyFields) -> ModelArchitecture:
    attention = fields.attention(theta=2000000.0, reads_bias=True)
    mlp = fields.mlp(bias=fields.boolean("mlp_bias", False))
    has_rope = _layers_with_rope(fields)
    uses_window = fields.boolean("use_sliding_window", False) and fields.has("sliding_window")
    window = fields.integer("sliding_window") if uses_window else None
    by_default = [uses_window and not rotates for rotates in has_rope]
    windows = fields.windows(by_default, window)
    rotated, plain = (
        fields.layers_with_windows(LayerSpec(mixer=each, mlp=mlp), windows)
        for each in (attention, replace(attention, rope=None))
    )
    chosen = tuple(layer if rotates else other for layer, other, rotates in zip(rotated, plain, has_rope, strict=True))
    return fields.architecture(chosen, is_tied=True)


def _layers_with_rope(fields: FamilyFields) -> list[bool]:
    num_layers = fields.num_layers
    given = fields.values.get("no_rope_layers")  # in spite of its name, 1 means that a layer has a rotary embedding
    if given is None:
        interval = fields.integer("no_rope_layer_interval", 4)
        return [(index + 1) % interval != 0 for index in range(num_layers)]
    if not isinstance(given, (list, tuple)) or len(given) < num_layers or any(each not in (0, 1) for each in given):
        raise fields.refusal(f"no_rope_layers={given!r} is not 0 or 1 for each of {num_layers} layers")
    return [each == 1 for each in given[:num_layers]]


FAMILY = Family(
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    gguf_name="smollm3",
    gguf_interleaves_heads=True,
    parse=_parse,
    reads=("no_rope_layers",),
)
