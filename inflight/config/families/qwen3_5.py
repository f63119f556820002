"""Qwen3.5, the models for text: three of four layers are recurrent, with the gated delta rule. The others have gated attention,
of which a quarter of each head is rotated."""

from collections.abc import Mapping
from dataclasses import replace

from inflight.config.architecture import LayerSpec, ModelArchitecture
from inflight.config.families.expert_fields import drafting_layers
from inflight.config.families.family import Family, partial_rotation
from inflight.config.families.family_fields import FamilyFields, layers_with
from inflight.config.families.qwen_vision import sections_from_gguf, with_sections, without_sections
from inflight.config.hidden_inputs import NAMED_MTP, numbered_mtp
from inflight.config.mixers import HEAD, GatedDeltaSpec, MixerSpec
from inflight.errors import UnsupportedModelError


def read_hybrid_mixers(fields: FamilyFields, *, is_grouped: bool = False, has_sections: bool = True) -> list[MixerSpec]:
    """The mixers of all layers. `is_grouped`: see `GatedDeltaSpec`. `has_sections`: tokens may have three positions."""
    whole = fields
    fields = without_sections(fields)
    partial = fields.number("partial_rotary_factor", 0.25)
    attention = fields.attention(head_dim=256, partial_rotary_factor=partial, reads_bias=True)
    attention = replace(attention, qk_norm=HEAD, has_gate=True)
    if has_sections:
        rope = with_sections(whole, attention.rope, attention.head_dim, (11, 11, 10), is_interleaved=True)
        attention = replace(attention, rope=rope)
    recurrence = replace(_read_recurrence(fields), is_grouped=is_grouped)
    num_layers = fields.num_layers
    interval = fields.integer("full_attention_interval", 4)
    every_fourth = [(index + 1) % interval == 0 for index in range(num_layers)]
    has_attention = fields.which_have_attention("linear_attention", every_fourth)
    return [attention if each else recurrence for each in has_attention]


def make_hybrid(fields: FamilyFields, layers: tuple[LayerSpec, ...]) -> ModelArchitecture:
    model = replace(fields.architecture(layers), norm_offset=1.0, mtp=NAMED_MTP)
    if not fields.has("num_nextn_predict_layers"):
        return model
    return replace(model, unread=drafting_layers(fields), mtp=numbered_mtp(fields.num_layers))  # of a GGUF file


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


def hybrid_from_gguf(given: Mapping[str, object]) -> dict[str, object]:
    """The fields of config.json that GGUF files do not have under keys of their own. A file counts the layers that predict
    drafts among all layers."""
    heads, width = given.get("ssm.time_step_rank"), given.get("ssm.inner_size")
    if not (isinstance(heads, int) and isinstance(width, int) and heads > 0 and width % heads == 0):
        raise UnsupportedModelError(
            f"the GGUF file's keys ssm.inner_size={width!r} and ssm.time_step_rank={heads!r} give no size of value heads"
        )
    found = sections_from_gguf(given) | {"linear_value_head_dim": width // heads, **partial_rotation(given)}
    count, drafting = given.get("block_count"), given.get("nextn_predict_layers", 0)
    if isinstance(count, int) and isinstance(drafting, int) and drafting:
        found |= {"num_hidden_layers": count - drafting, "num_nextn_predict_layers": drafting}
    return found


# Of recurrent layers: keys of a GGUF file -> fields
GGUF_HYBRID = {
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "full_attention_interval": "full_attention_interval",
}
# Keys that `hybrid_from_gguf` reads
GGUF_HYBRID_KEYS = ("ssm.inner_size", "rope.dimension_count", "rope.dimension_sections", "nextn_predict_layers")
GGUF_HYBRID_TENSORS = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}

FAMILY = Family(
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    gguf_name="qwen35",
    gguf_names=GGUF_HYBRID,
    gguf_fields=hybrid_from_gguf,
    gguf_keys=GGUF_HYBRID_KEYS,
    gguf_tensors=GGUF_HYBRID_TENSORS,
    gguf_tiles_value_heads=True,
    unread=("mtp.", "model.visual."),
    parse=_parse,
    reads=("partial_rotary_factor",),
)
