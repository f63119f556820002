"""Qwen3.5, the models for text: three of four layers are recurrent, with the gated delta rule. The others have gated attention,
of which a quarter of each head is rotated."""

from collections.abc import Mapping
from dataclasses import replace

from inflight.config.architecture import LayerSpec, ModelArchitecture
from inflight.config.families.family import Family, partial_rotation
from inflight.config.families.family_fields import FamilyFields, layers_with
from inflight.config.mixers import HEAD, GatedDeltaSpec, MixerSpec
from inflight.errors import UnsupportedModelError

# For images, positions have several parts. Those of a text are all equal, so a text is rotated as always.
_FIELDS_OF_IMAGES = ("mrope_section", "mrope_interleaved")


def read_hybrid_mixers(fields: FamilyFields, *, is_grouped: bool = False) -> list[MixerSpec]:
    """The mixers of all layers. `is_grouped`: see `GatedDeltaSpec`."""
    rope = fields.mapping("rope_parameters")
    values = {name: value for name, value in rope.values.items() if name not in _FIELDS_OF_IMAGES}
    fields = fields.with_values({"rope_parameters": values})
    partial = fields.number("partial_rotary_factor", 0.25)
    attention = fields.attention(head_dim=256, partial_rotary_factor=partial, reads_bias=True)
    attention = replace(attention, qk_norm=HEAD, has_gate=True)
    recurrence = replace(_read_recurrence(fields), is_grouped=is_grouped)
    num_layers = fields.num_layers
    interval = fields.integer("full_attention_interval", 4)
    every_fourth = [(index + 1) % interval == 0 for index in range(num_layers)]
    has_attention = fields.which_have_attention("linear_attention", every_fourth)
    return [attention if each else recurrence for each in has_attention]


def make_hybrid(fields: FamilyFields, layers: tuple[LayerSpec, ...]) -> ModelArchitecture:
    return replace(fields.architecture(layers), norm_offset=1.0)


def _parse(fields: FamilyFields) -> ModelArchitecture:
    return make_hybrid(fields, layers_with(read_hybrid_mixers(fields), fields.silu_mlp()))


def _read_recurrence(fields: FamilyFields) -> GatedDeltaSpec:
    num_key_heads = fields.integer("linear_num_key_heads", 16)
    num_value_heads = fields.integer("linear_num_value_heads", 32)
    kernel_size = fields.integer("linear_conv_kernel_dim", 4)
    if num_value_heads % num_key_heads:
        raise fields.refusal(
            f"linear_num_value_heads={num_value_heads} is not a multiple of linear_num_key_heads={num_key_heads}"
        )
    if kernel_size < 2:
        raise fields.refusal(f"linear_conv_kernel_dim={kernel_size} is not supported; at least 2 is")
    return GatedDeltaSpec(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        kernel_size=kernel_size,
    )


def _from_gguf(given: Mapping[str, object]) -> dict[str, object]:
    heads = given.get("ssm.time_step_rank")
    width = given.get("ssm.inner_size")
    if heads != given.get("ssm.group_count") or not (isinstance(heads, int) and isinstance(width, int) and heads > 0):
        raise UnsupportedModelError(
            f"a GGUF file with qwen35.ssm.time_step_rank={heads!r} value heads is not supported, because llama.cpp has them in "
            "another order unless they are as many as the key heads (ssm.group_count); use the model's safetensors"
        )
    return {"linear_value_head_dim": width // heads, **partial_rotation(given)}


FAMILY = Family(
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    gguf_name="qwen35",
    gguf_names={
        "ssm.group_count": "linear_num_key_heads",
        "ssm.time_step_rank": "linear_num_value_heads",
        "ssm.state_size": "linear_key_head_dim",
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "full_attention_interval": "full_attention_interval",
    },
    gguf_fields=_from_gguf,
    # the sections are for images
    gguf_keys=("ssm.inner_size", "rope.dimension_count", "rope.dimension_sections"),
    gguf_tensors={
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_a": "linear_attn.A_log",
        "ssm_dt.bias": "linear_attn.dt_bias",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    },
    wrapper=("Qwen3_5ForConditionalGeneration", "qwen3_5"),
    unread=("mtp.", "model.visual."),
    parse=_parse,
    reads=("partial_rotary_factor",),
)
