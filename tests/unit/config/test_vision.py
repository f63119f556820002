"""What config.json says about vision towers, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.config.architecture import GELU_TANH
from inflight.config.parse_architecture import parse_architecture
from inflight.config.unknown_family import describe_model
from inflight.config.vision import (
    Gemma3VisionSpec,
    Gemma4VisionSpec,
    Idefics3VisionSpec,
    Qwen3VisionSpec,
    Qwen25VisionSpec,
)
from inflight.errors import UnsupportedModelError

TEXT = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
SMOLVLM: dict[str, Any] = {
    "architectures": ["SmolVLMForConditionalGeneration"],
    "model_type": "smolvlm",
    "image_token_id": 299,
    "scale_factor": 4,
    "text_config": TEXT,
    "vision_config": {"hidden_size": 768, "num_attention_heads": 12, "image_size": 512, "patch_size": 16},
}


QWEN3_VL: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "image_token_id": 299,
    "text_config": {**TEXT, "model_type": "qwen3_vl_text", "head_dim": 128, "num_hidden_layers": 4},
    "vision_config": {
        "hidden_size": 1024,
        "num_heads": 16,
        "depth": 24,
        "intermediate_size": 4096,
        "out_hidden_size": 64,
    },
}
# as it was published: the fields of the part for text are at the top level
QWEN2_5_VL: dict[str, Any] = {
    **TEXT,
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "image_token_id": 299,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "vision_config": {"hidden_size": 1280, "num_heads": 16, "out_hidden_size": 64, "in_chans": 3, "window_size": 112},
}


GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "image_token_id": 299,
    "text_config": {
        **TEXT,
        "model_type": "gemma4_text",
        "head_dim": 16,
        "num_hidden_layers": 6,
        "vocab_size_per_layer_input": 300,
        "pad_token_id": 7,
    },
    "vision_config": {"num_hidden_layers": 27, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
    "audio_config": {"hidden_size": 1024},
}


def with_tower(of: dict[str, Any] = SMOLVLM, **fields: Any) -> dict[str, Any]:
    return {**of, "vision_config": {**of["vision_config"], **fields}}


def test_a_tower() -> None:
    """The sizes of SmolVLM-256M. Its config.json does not name those that are the defaults of transformers."""
    model = parse_architecture(SMOLVLM)
    assert (model.name, model.hidden_size, model.num_layers) == ("SmolVLMForConditionalGeneration", 64, 2)
    assert model.vision == Idefics3VisionSpec(
        image_token_id=299,
        out_size=64,
        hidden_size=768,
        num_layers=12,
        num_heads=12,
        mlp_size=3072,
        merge_size=4,
        patch_size=16,
        num_channels=3,
        positions_per_side=32,
        eps=1e-6,
        activation=GELU_TANH,
    )
    assert model.vision.num_tokens((1, 32, 32)) == 64
    assert model.vision.num_deepstack == 0


def test_qwen3_vl() -> None:
    model = parse_architecture(with_tower(of=QWEN3_VL, deepstack_visual_indexes=[5, 11, 17]))
    vision = model.vision
    assert isinstance(vision, Qwen3VisionSpec)
    assert (vision.num_layers, vision.deepstack_layers, vision.num_deepstack) == (24, (5, 11, 17), 3)
    assert (vision.positions_per_side, vision.patch_features) == (48, 3 * 2 * 16 * 16)
    assert vision.num_tokens((1, 14, 20)) == 70
    rope = model.layers[0].mixer.rope
    assert rope is not None
    assert (rope.theta, rope.mrope_section, rope.mrope_interleaved) == (500000.0, (24, 20, 20), True)


def test_qwen2_5_vl() -> None:
    model = parse_architecture(QWEN2_5_VL)
    vision = model.vision
    assert isinstance(vision, Qwen25VisionSpec)
    assert (vision.num_layers, vision.window, vision.full_layers) == (32, 4, (7, 15, 23, 31))
    assert (vision.patch_features, vision.mlp_size) == (3 * 2 * 14 * 14, 3420)
    rope = model.layers[0].mixer.rope
    assert rope is not None
    assert (rope.theta, rope.kind, rope.mrope_section, rope.mrope_interleaved) == (1e6, "default", (2, 3, 3), False)
    assert model.attentions[0].qkv_bias


def test_gemma4() -> None:
    model = parse_architecture(with_tower(of=GEMMA4, use_clipped_linears=True))
    vision = model.vision
    assert isinstance(vision, Gemma4VisionSpec)
    assert (vision.num_layers, vision.rope_theta, vision.patch_features) == (27, 50.0, 768)
    assert (vision.has_bounds, vision.is_standardized) == (True, False)
    assert vision.num_tokens((1, 42, 57)) == 14 * 19
    assert vision.grid_problem((1, 42, 57)) is None
    for grid, words in [((1, 42, 56), "multiples of 3"), ((2, 42, 57), "one frame"), ((1, 102, 102), "1156 tokens")]:
        assert words in (vision.grid_problem(grid) or "")
    assert set(model.unread) >= {"model.audio_tower.", "model.embed_audio."}
    assert not any(name.startswith(vision.prefixes) for name in model.unread)
    assert model.token_inputs is not None and model.token_inputs.padding_id == 7
    assert not any(attention.sees_whole_images for attention in model.attentions)
    text = {**GEMMA4["text_config"], "use_bidirectional_attention": "vision", "sliding_window": 9}
    larger = parse_architecture({**GEMMA4, "text_config": text})
    found = [(attention.window is not None, attention.sees_whole_images) for attention in larger.attentions]
    assert set(found) == {(True, True), (False, False)}


def test_gemma4_without_a_tower() -> None:
    for config in ({**GEMMA4, "vision_config": None}, {key: GEMMA4[key] for key in GEMMA4 if key != "vision_config"}):
        model = parse_architecture(config)
        assert model.vision is None
        assert set(model.unread) >= {"model.vision_tower.", "model.embed_vision."}


def test_a_config_that_names_only_its_type() -> None:
    without_names = {name: value for name, value in SMOLVLM.items() if name != "architectures"}
    assert parse_architecture(without_names) == parse_architecture(SMOLVLM)
    assert parse_architecture({**without_names, "model_type": "idefics3"}).vision == parse_architecture(SMOLVLM).vision


def test_the_tower_can_be_left_out() -> None:
    model = describe_model(SMOLVLM, "auto", language_model_only=True)
    assert model.vision is None
    assert set(model.unread) >= {"model.vision_model.", "model.connector."}
    assert describe_model(SMOLVLM, "auto").vision is not None


def test_gemma3() -> None:
    text = {**TEXT, "model_type": "gemma3_text", "head_dim": 16}
    tower = {"hidden_size": 48, "num_attention_heads": 3, "image_size": 36, "patch_size": 4}
    config = {"model_type": "gemma3", "text_config": text, "vision_config": tower, "mm_tokens_per_image": 9}
    config["image_token_index"] = 5
    vision = parse_architecture(config).vision
    assert isinstance(vision, Gemma3VisionSpec)
    assert (vision.merge_size, vision.num_tokens((1, 9, 9))) == (3, 9)
    assert vision.grid_problem((1, 9, 9)) is None
    assert "1 x 9 x 9" in (vision.grid_problem((1, 9, 6)) or "")
    assert all(attention.sees_whole_images for attention in parse_architecture(config).attentions)
    assert describe_model(config, "auto") == parse_architecture(config)
    model = describe_model(config, "auto", language_model_only=True)
    assert model.vision is None
    assert set(model.unread) >= {"model.vision_tower.", "model.multi_modal_projector."}
    with pytest.raises(UnsupportedModelError, match="mm_tokens_per_image=16"):
        parse_architecture({**config, "mm_tokens_per_image": 16})
    # of a model for text alone, the fields of the tower are not read
    assert parse_architecture({**config, "vision_config": "?"}, language_model_only=True) == model


def test_qwen3_5() -> None:
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    }
    for name, more in (("qwen3_5", {}), ("qwen3_5_moe", experts)):
        text = {**TEXT, **more, "model_type": f"{name}_text", "head_dim": 128, "num_hidden_layers": 4}
        config = {**QWEN3_VL, "architectures": None, "model_type": name, "text_config": text}
        vision = parse_architecture(config).vision
        assert isinstance(vision, Qwen3VisionSpec)
        assert vision.num_deepstack == 0
        rope = parse_architecture(config).attentions[0].rope
        assert rope is not None
        assert (rope.mrope_section, rope.mrope_interleaved) == ((11, 11, 10), True)
        with pytest.raises(UnsupportedModelError, match="248056"):
            parse_architecture({**config, "image_token_id": None})


@pytest.mark.parametrize("grid", [(1, 4, 6), (1, 6, 4), (1, 0, 4), (0, 4, 4)])
def test_a_grid_that_cannot_be_divided(grid: tuple[int, int, int]) -> None:
    vision = parse_architecture(SMOLVLM).vision
    assert vision is not None
    assert "multiples of 4" in (vision.grid_problem(grid) or "")
    assert vision.grid_problem((1, 4, 8)) is None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**SMOLVLM, "image_token_id": 300}, ["300", "vocab_size"]),
        ({**SMOLVLM, "image_token_id": -1}, ["image_token_id"]),
        ({**SMOLVLM, "scale_factor": 0}, ["scale_factor"]),
        ({**SMOLVLM, "text_config": {**TEXT, "model_type": "qwen2"}}, ["text_config", "qwen2", "llama"]),
        ({**SMOLVLM, "vision_config": "siglip"}, ["vision_config"]),
        (with_tower(num_attention_heads=7), ["vision_config", "768", "7 heads"]),
        (with_tower(hidden_act="xielu"), ["vision_config", "xielu", "gelu"]),
        (with_tower(image_size=8), ["vision_config", "image_size"]),
        (with_tower(image_size=[8, 9]), ["vision_config", "image_size"]),
        (with_tower(num_hidden_layers=10**6), ["vision_config", "num_hidden_layers"]),
        (with_tower(of=QWEN3_VL, depth=10**6), ["vision_config", "depth"]),
        (with_tower(of=QWEN3_VL, num_heads=6), ["vision_config", "1024", "multiple of 4"]),
        (with_tower(of=QWEN3_VL, out_hidden_size=65), ["out_hidden_size=65", "64"]),
        (with_tower(of=QWEN3_VL, num_position_embeddings=48), ["num_position_embeddings"]),
        (with_tower(of=QWEN3_VL, deepstack_visual_indexes=[24]), ["deepstack_visual_indexes", "24"]),
        (with_tower(of=QWEN3_VL, deepstack_visual_indexes=[1, 1]), ["deepstack_visual_indexes"]),
        (with_tower(of=QWEN3_VL, deepstack_visual_indexes=[0, 1, 2, 3, 4]), ["deepstack_visual_indexes", "4"]),
        (with_tower(of=QWEN2_5_VL, window_size=20), ["window_size=20"]),
        (with_tower(of=QWEN2_5_VL, fullatt_block_indexes="7"), ["fullatt_block_indexes"]),
        ({**QWEN2_5_VL, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 4]}}, ["mrope_section", "8"]),
        ({**QWEN2_5_VL, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3]}}, ["mrope_section", "three"]),
        (with_tower(of=GEMMA4, num_key_value_heads=4), ["num_key_value_heads=4", "12"]),
        (with_tower(of=GEMMA4, head_dim=66), ["head_dim=66", "multiple of 4"]),
        (with_tower(of=GEMMA4, rope_parameters={"rope_type": "yarn"}), ["rope_type", "yarn", "axial"]),
        (with_tower(of=GEMMA4, hidden_activation="xielu"), ["hidden_activation", "xielu"]),
    ],
)
def test_a_refusal_names_the_field(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedModelError) as refusal:
        parse_architecture(config)
    assert all(word in str(refusal.value) for word in words)
