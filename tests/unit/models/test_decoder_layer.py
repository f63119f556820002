"""A layer: which tensors of a checkpoint it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from inflight.config.gguf_config import read_model_config
from inflight.config.unknown_family import describe_model
from inflight.layers.mixer import MixerPlace
from inflight.models.decoder_layer import DecoderLayer
from tests.support.model_zoo import FAMILY_CONFIGS, write_model
from tests.unit.layers.contexts import layer_context


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3", "olmo2"])
def test_a_layer_takes_all_its_tensors(family: str, tmp_path: Path) -> None:
    write_model(FAMILY_CONFIGS[family][0], tmp_path, seed=0)
    architecture = describe_model(read_model_config(tmp_path), "inflight")
    place = MixerPlace(architecture=architecture, layer=1, rotation_index=0, context=layer_context(torch.float32))
    layer, prefix = DecoderLayer(place), "model.layers.1"
    assert layer.layer == 1
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        stored = {name for name in file.keys() if name.startswith(f"{prefix}.")}  # noqa: SIM118 (no mapping)
    assert {name for name, _ in layer.weight_slots(prefix)} == stored != set()
