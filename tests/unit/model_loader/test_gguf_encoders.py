"""Encoders from GGUF files, which the package gguf writes under its names, have the states of the same weights in a folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    DistilBertConfig,
    EuroBertConfig,
    ModernBertConfig,
    NomicBertConfig,
    PreTrainedConfig,
    RobertaConfig,
    XLMRobertaConfig,
)

from inflight import LLM
from inflight.config.gguf_config import read_model_config
from inflight.config.parse_architecture import parse_architecture
from inflight.errors import UnsupportedModelError
from tests.support.close_logits import FLOAT32_TOLERANCE, relative_difference
from tests.support.encoders import ENCODER_CONFIGS, Encoder, reference_hidden, texts_of, write_encoder
from tests.support.gguf_files import Number, floats
from tests.support.gguf_models import write_pair

_ARCH = gguf.MODEL_ARCH
ARCHITECTURES = {
    **dict.fromkeys(("bert", "distilbert", "roberta", "xlm-roberta"), _ARCH.BERT),
    "nomic_bert": _ARCH.NOMIC_BERT,
    "modernbert": _ARCH.MODERN_BERT,
    "eurobert": _ARCH.EUROBERT,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "bert": BertConfig(**{**ENCODER_CONFIGS["bert"][0].to_dict(), "intermediate_size": 128}),
    "distilbert": DistilBertConfig(**{**ENCODER_CONFIGS["distilbert"][0].to_dict(), "hidden_dim": 128}),
    "roberta": RobertaConfig(**{**ENCODER_CONFIGS["roberta"][1].to_dict(), "intermediate_size": 128}),
    "xlm-roberta": XLMRobertaConfig(**{**ENCODER_CONFIGS["xlm-roberta"][0].to_dict(), "intermediate_size": 128}),
    "nomic_bert": NomicBertConfig(**{**ENCODER_CONFIGS["nomic_bert"][0].to_dict(), "intermediate_size": 128}),
    "modernbert": ModernBertConfig(**{**ENCODER_CONFIGS["modernbert"][0].to_dict(), "intermediate_size": 128}),
    "eurobert": EuroBertConfig(**{**ENCODER_CONFIGS["eurobert"][1].to_dict(), "intermediate_size": 128}),
}


def write_file(
    family: str,
    folder: Path,
    *,
    is_quantized: bool = False,
    causal: bool = False,
    pooling: gguf.PoolingType | None = gguf.PoolingType.MEAN,
    labels: list[str] | None = None,
    renames: dict[str, str] | None = None,
) -> Path:
    """The model of a folder, as llama.cpp's converter writes it. If it is quantized, the folder gets the rounded weights.
    `renames`: names of tensors of the folder -> their names in the file, where the package does not know them; "": it is left
    out."""
    config: Any = CONFIGS[family]
    kind = ARCHITECTURES[family]
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[kind])
    is_distilbert = family == "distilbert"
    # positions begin behind the number of the padding token
    offset = config.pad_token_id + 1 if family.endswith("roberta") else 0
    writer.add_context_length(config.max_position_embeddings - offset)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.hidden_dim if is_distilbert else config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_causal_attention(causal)
    if pooling is not None:
        writer.add_pooling_type(pooling)
    if labels is not None:
        writer.add_classifier_output_labels(labels)
    if family == "eurobert":
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    elif family == "modernbert":
        writer.add_layer_norm_eps(config.norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
        writer.add_sliding_window(config.local_attention)
        writer.add_sliding_window_pattern(3)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_vocab_size(config.vocab_size)
    else:
        writer.add_layer_norm_eps(1e-12 if is_distilbert else config.layer_norm_eps)
        writer.add_token_type_count(2)
    if family == "nomic_bert":
        writer.add_rope_freq_base(1000.0)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    stored = load_file(folder / "model.safetensors")
    for name, tensor in stored.items():
        theirs = (renames or {}).get(name)
        if theirs is None:
            own = name.removeprefix("roberta.").removeprefix("bert.").removeprefix("model.")
            theirs = names.get_name(own, try_suffixes=(".weight", ".bias"))
        if not theirs:
            assert "pooler" in name or name in (renames or {}), name
            continue
        data = tensor.numpy()
        if theirs == "position_embd.weight":
            data = data[offset:].copy()
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


@pytest.mark.parametrize(
    ("family", "is_quantized"), [*((family, False) for family in ARCHITECTURES), ("bert", True), ("modernbert", True)]
)
def test_the_file_is_the_folder(family: str, is_quantized: bool, tmp_path: Path) -> None:
    folder = write_encoder(CONFIGS[family], tmp_path / "model", seed=3)
    path = write_file(family, folder, is_quantized=is_quantized)
    texts = texts_of((1, 30, 17))
    for found, truth in zip(Encoder(path)(texts), reference_hidden(folder, texts), strict=True):
        # activations are rounded to 8 bits, too
        assert relative_difference(found, truth) < (5e-2 if is_quantized else FLOAT32_TOLERANCE)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_the_specification_is_that_of_the_folder(family: str, tmp_path: Path) -> None:
    folder = write_encoder(CONFIGS[family], tmp_path / "model", seed=3)
    config = read_model_config(write_file(family, folder))
    assert config["pooling_type"] == "MEAN"
    of_file, of_folder = (parse_architecture(each) for each in (config, read_model_config(folder)))
    assert of_file.layers == of_folder.layers
    theirs = of_folder.added_embeddings
    if theirs is not None and theirs.first_position:
        theirs = replace(theirs, num_positions=theirs.num_positions - theirs.first_position, first_position=0)
    assert of_file.added_embeddings == theirs
    lengths = (of_file.max_position_embeddings, of_folder.max_position_embeddings)
    assert (of_file.final_norm, lengths[0]) == (of_folder.final_norm, lengths[1])
    assert of_file.rms_norm_eps == pytest.approx(of_folder.rms_norm_eps)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_causal_one_is_refused(family: str, tmp_path: Path) -> None:
    folder = write_encoder(CONFIGS[family], tmp_path / "model", seed=3)
    with pytest.raises(UnsupportedModelError, match="is_decoder"):
        parse_architecture(read_model_config(write_file(family, folder, causal=True)))


_LAYERS = (("dense", "cls"), ("out_proj", "cls.output"))
_CLASSES = {f"classifier.{of}.{kind}": f"{to}.{kind}" for kind in ("weight", "bias") for of, to in _LAYERS}


@pytest.mark.parametrize("labels", [["no", "maybe", "yes"], None])
def test_the_scores_of_a_reranker(labels: list[str] | None, tmp_path: Path) -> None:
    """BGE's rerankers are of XLM-RoBERTa, whose files have both layers for classes."""
    count = 1 if labels is None else len(labels)
    config = XLMRobertaConfig(**CONFIGS["xlm-roberta"].to_diff_dict(), num_labels=count)
    folder = write_encoder(config, tmp_path / "model", seed=3, kind=AutoModelForSequenceClassification)
    path = write_file("xlm-roberta", folder, pooling=None, labels=labels, renames=_CLASSES)
    texts = texts_of((9, 30))
    truth: Any = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        expected = torch.cat([truth(torch.tensor([text])).logits for text in texts])
    expected = expected.sigmoid() if count == 1 else expected.softmax(dim=-1)
    with LLM(str(path), dtype="float32", skip_tokenizer_init=True) as llm:
        found = llm.classify(texts)
    assert [each.outputs.probs for each in found] == [pytest.approx(row, abs=1e-4) for row in expected.tolist()]
    assert list(found[0].outputs.labels) == (labels or ["LABEL_0"])


def test_classes_without_the_pooler_are_refused(tmp_path: Path) -> None:
    """The converter leaves the pooler of BERT out. Nothing in the file says which hidden states ModernBERT's layers read."""
    config = BertConfig(**CONFIGS["bert"].to_diff_dict(), num_labels=3)
    folder = write_encoder(config, tmp_path / "bert", seed=3, kind=AutoModelForSequenceClassification)
    names = {f"classifier.{kind}": f"cls.output.{kind}" for kind in ("weight", "bias")}
    with pytest.raises(UnsupportedModelError, match=r"not cls\.weight"):
        read_model_config(write_file("bert", folder, labels=["a", "b", "c"], renames=names))
    config = ModernBertConfig(**CONFIGS["modernbert"].to_diff_dict(), num_labels=3)
    folder = write_encoder(config, tmp_path / "modernbert", seed=3, kind=AutoModelForSequenceClassification)
    names["classifier.bias"] = ""
    with pytest.raises(UnsupportedModelError, match="which hidden states"):
        read_model_config(write_file("modernbert", folder, renames=names))


@pytest.mark.parametrize("name", ["jina-bert-v2", "nomic-bert-moe", "neo-bert"])
def test_other_encoders_of_the_format_are_refused(name: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=rf"general\.architecture='{name}'.*modern-bert"):
        read_model_config(tmp_path / "model.gguf")


def test_a_decoder_that_is_pooled(tmp_path: Path) -> None:
    """A file of Qwen3-Embedding is a file of Qwen3 with this key."""
    plain, path = write_pair(tmp_path, "qwen3", {}, {"qwen3.pooling_type": Number("I", gguf.PoolingType.MEAN)})
    texts = texts_of((9, 30))
    options: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64}
    with LLM(str(plain), runner="pooling", pooler_config={"pooling_type": "MEAN"}, **options) as llm:
        truth = [each.outputs.embedding for each in llm.embed(texts)]
    with LLM(str(path), **options) as llm:
        assert [each.outputs.embedding for each in llm.embed(texts)] == [pytest.approx(row, abs=1e-4) for row in truth]


def test_a_pooling_that_is_not_known_is_refused(tmp_path: Path) -> None:
    _, path = write_pair(tmp_path, "qwen3", {}, {"qwen3.pooling_type": Number("I", 4)})
    with pytest.raises(UnsupportedModelError, match=r"qwen3\.pooling_type=4"):
        read_model_config(path)


def test_qwen3_reranker(tmp_path: Path) -> None:
    """Its file has copies of the rows of "yes" and "no"."""
    keys = {"qwen3.pooling_type": Number("I", gguf.PoolingType.RANK), "qwen3.classifier.output_labels": ["yes", "no"]}
    plain, path = write_pair(tmp_path, "qwen3", {}, keys, more={"cls.output.weight": floats(torch.ones(2, 256))})
    for folder in (plain, path.parent):
        Tokenizer(models.WordLevel({"[UNK]": 0, "no": 5, "yes": 7, "red": 9}, "[UNK]")).save(
            str(folder / "tokenizer.json")
        )
        (folder / "tokenizer_config.json").write_text('{"unk_token": "[UNK]"}')
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 64}
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["no", "yes"],
        "is_original_qwen3_reranker": True,
    }
    scores = []
    for model, given in ((plain, {"hf_overrides": overrides}), (path, {})):
        with LLM(str(model), **options, **given) as llm:
            scores.append([each.outputs.score for each in llm.score("red", ["yes", "red"])])
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)
