"""Overrides of config.json in every spelling, on every shape of a config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, Gemma3Config, Gemma3TextConfig

from inflight.config.engine import ModelConfig
from inflight.config.engine_args import EngineArgs
from inflight.config.mixers import RopeConfig
from inflight.config.overrides import ineffective_overrides, merge_overrides
from inflight.config.parse_architecture import parse_architecture
from inflight.config.unknown_family import describe_model
from inflight.errors import UnsupportedModelError
from inflight.models.transformers_fallback.build import read_config
from tests.support.model_zoo import FALLBACK_CONFIGS, FAMILY_CONFIGS

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64, "factor": 8.0}
PLAIN = FAMILY_CONFIGS["llama"][0].to_dict()
BY_LAYER = FAMILY_CONFIGS["gemma3"][0].to_dict()
WITHOUT_ROPE = {name: value for name, value in PLAIN.items() if name != "rope_parameters"}
# shapes of config.json with one meaning: theta is 5e5, and the embedding is scaled as in Llama 3
SHAPES: dict[str, dict[str, Any]] = {
    "transformers 4": {**WITHOUT_ROPE, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "old": {**WITHOUT_ROPE, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
    "transformers 5": {**WITHOUT_ROPE, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    "both": {
        **WITHOUT_ROPE,
        "rope_theta": 5e5,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
    },
}


def ropes(config: dict[str, Any], **overrides: Any) -> list[RopeConfig]:
    found = [each.rope for each in parse_architecture(merge_overrides(config, overrides)).attentions]
    assert None not in found
    return [each for each in found if each is not None]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_theta_wins_in_every_spelling(shape: str) -> None:
    for overrides in (
        {"rope_theta": 7e6},
        {"rope_parameters": {"rope_theta": 7e6}},
        {"rope_scaling": {"rope_theta": 7e6}},
    ):
        rope = ropes(SHAPES[shape], **overrides)[0]
        assert (rope.theta, rope.kind, rope.factor) == (7e6, "llama3", 8.0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_a_scaling_wins_in_every_spelling(shape: str, name: str) -> None:
    rope = ropes(SHAPES[shape], **{name: YARN})[0]
    assert (rope.theta, rope.kind, rope.factor, rope.original_max_position_embeddings) == (5e5, "yarn", 4.0, 256)
    assert (
        ropes(SHAPES[shape], **{name: {"factor": 2.0}})[0]
        == ropes(SHAPES[shape], **{name: {**LLAMA3, "factor": 2.0}})[0]
    )
    assert ropes(SHAPES[shape], **{name: {"factor": 2.0}})[0].factor == 2.0
    assert ropes(SHAPES[shape], **{name: None})[0] == RopeConfig(theta=5e5)
    assert ropes(SHAPES[shape], **{name: YARN, "rope_theta": 9.0})[0].theta == 9.0


def test_a_rope_that_the_file_does_not_have() -> None:
    assert ropes(WITHOUT_ROPE, rope_theta=7.0)[0].theta == 7.0
    assert ropes(WITHOUT_ROPE, rope_scaling=YARN, rope_theta=7.0)[0].kind == "yarn"
    assert ropes(WITHOUT_ROPE, rope_parameters={**YARN, "rope_theta": 7.0})[0].theta == 7.0


def test_layers_of_two_kinds() -> None:
    def thetas(config: dict[str, Any], **overrides: Any) -> set[tuple[float, str]]:
        return {(rope.theta, rope.kind) for rope in ropes(config, **overrides)}

    old = {name: value for name, value in BY_LAYER.items() if name != "rope_parameters"}
    for config in (BY_LAYER, {**old, "rope_theta": 1e6, "rope_local_base_freq": 1e4}):
        assert thetas(config) == {(1e6, "default"), (1e4, "default")}
        assert thetas(config, rope_theta=7.0) == {(7.0, "default"), (1e4, "default")}
        assert thetas(config, rope_local_base_freq=7.0) == {(1e6, "default"), (7.0, "default")}
        assert thetas(config, rope_scaling={"rope_type": "linear", "factor": 8.0}) == {
            (1e6, "linear"),
            (1e4, "default"),
        }
        by_layer = {"full_attention": {"rope_theta": 5.0}, "sliding_attention": {"rope_theta": 3.0}}
        assert thetas(config, rope_parameters=by_layer) == {(5.0, "default"), (3.0, "default")}


def test_the_original_length_beside_the_rope_object() -> None:
    config = {**FAMILY_CONFIGS["phi3"][1].to_dict()}
    for overrides in (
        {"original_max_position_embeddings": 512},
        {"rope_scaling": {"original_max_position_embeddings": 512}},
    ):
        assert ropes(config, **overrides)[0].original_max_position_embeddings == 512


@pytest.mark.parametrize("stored", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("given", ["dtype", "torch_dtype"])
def test_dtype(stored: str, given: str) -> None:
    config = {name: value for name, value in PLAIN.items() if name != "dtype"} | {stored: "bfloat16"}
    assert parse_architecture(merge_overrides(config, {given: "float16"})).dtype == "float16"


def test_a_dtype_that_is_given_replaces_one_that_is_not_supported() -> None:
    config = {**PLAIN, "dtype": "float8_e4m3fn"}
    args = EngineArgs(dtype="float16", hf_overrides={"vocab_size": 7})
    architecture = parse_architecture(merge_overrides(config, args.config_overrides))
    assert (architecture.dtype, architecture.vocab_size) == ("float16", 7)
    assert EngineArgs().config_overrides == {}


def wrapper(**more: Any) -> dict[str, Any]:
    text = Gemma3TextConfig(**{**BY_LAYER, "dtype": "bfloat16"})
    tower = {"mm_tokens_per_image": 49, "image_token_index": 5}
    return json.loads(json.dumps({**Gemma3Config(text_config=text, **tower).to_dict(), **more}))


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("rope_theta", 7.0, lambda model: max(each.rope.theta for each in model.attentions) == 1e4),
        ("dtype", "float16", lambda model: model.dtype == "float16"),
        ("torch_dtype", "float16", lambda model: model.dtype == "float16"),
        ("tie_word_embeddings", False, lambda model: not model.tie_word_embeddings),
        ("eos_token_id", [5, 6], lambda model: model.eos_token_ids == (5, 6)),
        ("max_position_embeddings", 333, lambda model: model.max_position_embeddings == 333),
        ("num_hidden_layers", 1, lambda model: model.num_layers == 1),
    ],
)
def test_models_that_also_read_images(name: str, value: object, read: Any) -> None:
    config = {**wrapper(), "architectures": ["Gemma3ForConditionalGeneration"]}
    if name == "num_hidden_layers":
        config["text_config"]["layer_types"] = config["text_config"]["layer_types"][:1]
    for overrides in ({name: value}, {"text_config": {name: value}}):
        assert read(parse_architecture(merge_overrides(config, overrides))), overrides
    with_both = merge_overrides(config, {"vision_config": {"hidden_size": 5}})
    assert with_both["vision_config"] == {**config["vision_config"], "hidden_size": 5}
    assert with_both["text_config"] == config["text_config"]


def test_an_object_for_text_on_a_model_for_text_alone() -> None:
    assert parse_architecture(merge_overrides(PLAIN, {"text_config": {"vocab_size": 7}})).vocab_size == 7


def test_sizes_under_the_names_of_a_family() -> None:
    config = FALLBACK_CONFIGS["gpt2"][0].to_dict()
    merged = merge_overrides(config, {"max_position_embeddings": 512, "num_hidden_layers": 1})
    described = describe_model(merged, "auto")
    assert (described.max_position_embeddings, described.num_layers) == (512, 1)
    assert merged["n_positions"] == 512
    assert "max_position_embeddings" not in merged


def test_synonyms_of_a_native_family() -> None:
    config = {**FAMILY_CONFIGS["lfm2"][0].to_dict(), "block_ff_dim": 64, "block_auto_adjust_ff_dim": False}
    assert parse_architecture(merge_overrides(config, {"intermediate_size": 96})).layers[0].mlp.size == 96


def test_names_that_change_nothing_are_found() -> None:
    def names(config: dict[str, Any], overrides: dict[str, Any]) -> list[str]:
        return ineffective_overrides(config, overrides, parse_architecture)

    config = SHAPES["transformers 5"]
    assert names(config, {}) == []
    assert names(config, {"rope_theta": 7.0, "ropetheta": 1, "vocab_size": 9}) == ["ropetheta"]
    assert names(config, {"rope_theta": 5e5}) == []  # the file says the same
    assert names(config, {"hidden_act": "silu", "vocab_sise": None}) == ["vocab_sise"]
    images = {**wrapper(), "architectures": ["Gemma3ForConditionalGeneration"]}
    assert names(images, {"text_config": {"vocab_size": 7, "x": 1}}) == ["text_config.x"]


def test_transformers_reads_the_merged_file_as_we_do(tmp_path: Path) -> None:
    """For models that transformers' code computes."""

    def read(folder: Path, overrides: dict[str, Any]) -> Any:
        architecture = describe_model(json.loads((folder / "config.json").read_text()), "transformers")
        return read_config(
            ModelConfig(
                folder=folder,
                name="x",
                architecture=architecture,
                dtype="float32",
                max_model_len=64,
                load_format="dummy",
                seed=0,
                fingerprint="",
                config_overrides=overrides,
            )
        )

    for shape in SHAPES.values():
        for overrides in (
            {"rope_theta": 7e6},
            {"rope_scaling": YARN},
            {"rope_parameters": YARN},
            {"rope_scaling": None},
        ):
            (tmp_path / "config.json").write_text(json.dumps({**shape, "model_type": "llama"}))
            theirs, ours = read(tmp_path, overrides).rope_parameters, ropes(shape, **overrides)[0]
            assert (theirs["rope_theta"], theirs["rope_type"]) == (ours.theta, ours.kind)
            assert theirs.get("factor", 1.0) == ours.factor
    FALLBACK_CONFIGS["gpt2"][0].save_pretrained(tmp_path)
    assert read(tmp_path, {"max_position_embeddings": 512}).n_positions == 512
    assert isinstance(AutoConfig.from_pretrained(tmp_path), type(read(tmp_path, {"dtype": "float16"})))


def test_an_override_that_the_model_needs_has_an_effect() -> None:
    def describe(config: Mapping[str, object]) -> object:
        if "needed" not in config:
            raise UnsupportedModelError("no such model")
        return config.get("read")

    overrides = {"needed": 1, "read": 2, "unread": 3}
    assert ineffective_overrides({"read": 1}, overrides, describe) == ["unread"]


def test_a_scaling_that_is_no_object_is_refused() -> None:
    for value in (3, "yarn", [1]):
        for config in (SHAPES["transformers 4"], WITHOUT_ROPE):
            with pytest.raises(UnsupportedModelError, match="is not an object"):
                ropes(config, rope_scaling=value)


def test_only_the_part_for_text_gets_the_name_of_its_own_family() -> None:
    """The names of the whole model stay outside, also if the part for text has such names, too."""
    config = {**wrapper(), "architectures": ["Gemma3ForConditionalGeneration"]}
    merged = merge_overrides(config, {"architectures": ["A"], "model_type": "b", "auto_map": {"c": "d"}, "x": 1})
    assert (merged["architectures"], merged["model_type"], merged["auto_map"]) == (["A"], "b", {"c": "d"})
    text = merged["text_config"]
    assert isinstance(text, dict)
    assert text == {**config["text_config"], "x": 1} and "x" not in merged


def test_a_field_of_both_parts_is_changed_in_both() -> None:
    config = {"hidden_size": 1, "text_config": {"hidden_size": 2, "y": 3}, "vision_config": {"y": 4, "z": 5}}
    merged = merge_overrides(config, {"hidden_size": 7, "vision_config": {"y": 8}, "text_config": {"y": 9}})
    assert merged == {"hidden_size": 7, "text_config": {"hidden_size": 7, "y": 9}, "vision_config": {"y": 8, "z": 5}}
    assert config["hidden_size"] == 1 and config["vision_config"] == {"y": 4, "z": 5}
