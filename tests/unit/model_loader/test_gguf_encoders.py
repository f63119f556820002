"""Encoders from GGUF files, which the package gguf writes under its names, have the states of the same weights in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, NomicBertConfig, PreTrainedConfig

from inflight.config.gguf_config import read_model_config
from inflight.config.parse_architecture import parse_architecture
from inflight.errors import UnsupportedModelError
from tests.support.encoders import ENCODER_CONFIGS, Encoder, reference_hidden, texts_of, write_encoder

ARCHITECTURES = {"bert": gguf.MODEL_ARCH.BERT, "nomic_bert": gguf.MODEL_ARCH.NOMIC_BERT}
CONFIGS: dict[str, PreTrainedConfig] = {
    "bert": BertConfig(**{**ENCODER_CONFIGS["bert"][0].to_dict(), "intermediate_size": 128}),
    "nomic_bert": NomicBertConfig(**{**ENCODER_CONFIGS["nomic_bert"][0].to_dict(), "intermediate_size": 128}),
}


def write_file(family: str, folder: Path, *, is_quantized: bool = False, causal: bool = False) -> Path:
    """The model of a folder, as llama.cpp's converter writes it. If it is quantized, the folder gets the rounded weights."""
    config: Any = CONFIGS[family]
    kind = ARCHITECTURES[family]
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[kind])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(causal)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_token_type_count(2)
    if family == "nomic_bert":
        writer.add_rope_freq_base(1000.0)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    stored = load_file(folder / "model.safetensors")
    for name, tensor in stored.items():
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if theirs is None:
            assert "pooler" in name, name
            continue
        data = tensor.numpy()
        if is_quantized and name.endswith("weight") and tensor.dim() == 2 and "embeddings" not in name:
            raw = gguf.quants.quantize(data, gguf.GGMLQuantizationType.Q8_0)
            stored[name] = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q8_0))
            writer.add_tensor(theirs, raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(theirs, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_the_file_is_the_folder(family: str, is_quantized: bool, tmp_path: Path) -> None:
    folder = write_encoder(CONFIGS[family], tmp_path / "model", seed=3)
    path = write_file(family, folder, is_quantized=is_quantized)
    texts = texts_of((1, 30, 17))
    for found, truth in zip(Encoder(path)(texts), reference_hidden(folder, texts), strict=True):
        # activations are rounded to 8 bits, too
        assert float((found - truth).abs().max() / truth.abs().max()) < (5e-2 if is_quantized else 1e-4)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_the_specification_is_that_of_the_folder(family: str, tmp_path: Path) -> None:
    folder = write_encoder(CONFIGS[family], tmp_path / "model", seed=3)
    config = read_model_config(write_file(family, folder))
    assert config["pooling_type"] == "MEAN"
    of_file, of_folder = (parse_architecture(each) for each in (config, read_model_config(folder)))
    assert (of_file.layers, of_file.added_embeddings) == (of_folder.layers, of_folder.added_embeddings)
    assert (of_file.final_norm, of_file.max_position_embeddings) == (of_folder.final_norm, 512)
    assert of_file.rms_norm_eps == pytest.approx(of_folder.rms_norm_eps)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_causal_one_is_refused(family: str, tmp_path: Path) -> None:
    folder = write_encoder(CONFIGS[family], tmp_path / "model", seed=3)
    with pytest.raises(UnsupportedModelError, match="is_decoder"):
        parse_architecture(read_model_config(write_file(family, folder, causal=True)))
