"""Gemma 4 with its tower for images. Videos and sounds are not read."""

from inflight.config.architecture import ModelArchitecture
from inflight.config.families import gemma4
from inflight.config.families.vision_family import VisionFamily, tower_activation
from inflight.config.json_fields import JsonFields
from inflight.config.vision import Gemma4VisionSpec


def _read_tower(config: JsonFields, model: ModelArchitecture) -> Gemma4VisionSpec | None:
    if not config.has("vision_config"):
        return None
    tower = config.mapping("vision_config")
    num_heads = tower.integer("num_attention_heads", 12)
    head_dim = tower.integer("head_dim", 64)
    num_kv_heads = tower.integer("num_key_value_heads", 12)
    if num_kv_heads != num_heads:
        raise tower.refusal(f"num_key_value_heads={num_kv_heads} is not num_attention_heads={num_heads}")
    if head_dim % 4:
        raise tower.refusal(f"head_dim={head_dim} is not a multiple of 4: rows and columns rotate pairs of its numbers")
    rope = tower.mapping("rope_parameters")
    kind = rope.text("rope_type", "axial")
    if kind not in ("axial", "default"):  # both are the same to transformers
        raise rope.refusal(f'rope_type={kind!r} is not supported; "axial" is')
    return Gemma4VisionSpec(
        image_token_id=config.integer("image_token_id", 258880, least=0),
        out_size=model.hidden_size,
        hidden_size=tower.integer("hidden_size", 768),
        num_layers=tower.integer("num_hidden_layers", 16),
        num_heads=num_heads,
        head_dim=head_dim,
        mlp_size=tower.integer("intermediate_size", 3072),
        merge_size=tower.integer("pooling_kernel_size", 3),
        patch_size=tower.integer("patch_size", 16),
        num_positions=tower.integer("position_embedding_size", 10240),
        eps=tower.number("rms_norm_eps", 1e-6),
        rope_theta=rope.number("rope_theta", 100.0),
        activation=tower_activation(tower, "gelu_pytorch_tanh", name="hidden_activation"),
        has_bounds=tower.boolean("use_clipped_linears", False),
        is_standardized=tower.boolean("standardize", False),
    )


VISION_FAMILY = VisionFamily(
    architecture="Gemma4ForConditionalGeneration",
    model_type="gemma4",
    texts=(gemma4.FAMILY,),
    tower=Gemma4VisionSpec,
    read_tower=_read_tower,
)
