"""The hidden states of an encoder are those of transformers: texts of many lengths in one step, without padding."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from inflight.attention.cpu_paged import CpuPagedBackend
from inflight.config.engine import QuantizationConfig
from inflight.config.parse_architecture import parse_architecture
from inflight.config.pipeline_stage import pipeline_stage
from inflight.config.ranks import RankLayout
from inflight.config.whole_prompts import is_causal
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.distributed.thread_world import ThreadWorlds
from inflight.errors import UnsupportedModelError
from inflight.models.decoder import DecoderForCausalLM
from tests.support.encoders import ENCODER_CONFIGS, Encoder, reference_hidden, texts_of, write_encoder
from tests.support.instruction_sets import INSTRUCTION_SETS_HERE

LENGTHS = (1, 40, 2, 17, 130, 16, 300, 33)
EACH = [(family, index) for family, configs in ENCODER_CONFIGS.items() for index in range(len(configs))]
KERNELS = pytest.mark.skipif(not INSTRUCTION_SETS_HERE, reason="the C++ kernels are not here")


def difference(found: list[Tensor], truth: list[Tensor]) -> float:
    """The largest one, relative to the largest number of the truth."""
    assert [each.shape for each in found] == [each.shape for each in truth]
    largest = max(float(each.abs().max()) for each in truth)
    return max(float((a.float() - b.float()).abs().max()) for a, b in zip(found, truth, strict=True)) / largest


@pytest.mark.parametrize(("family", "index"), EACH)
def test_hidden_states(family: str, index: int, tmp_path: Path) -> None:
    folder = write_encoder(ENCODER_CONFIGS[family][index], tmp_path / "model", seed=index)
    texts = texts_of(LENGTHS)
    truth = reference_hidden(folder, texts)
    encoder = Encoder(folder)
    assert not is_causal(encoder.architecture)
    for _ in range(2):  # the second step replays the tape of the first
        assert difference(encoder(texts), truth) < 1e-4
    assert difference(encoder(texts[2:4]), truth[2:4]) < 1e-4
    assert min(float(each.std()) for each in truth) > 0.3, (
        "states that are all alike would agree whatever the model does"
    )
    if isinstance(encoder.backend, CpuPagedBackend):
        assert isinstance(encoder.model, DecoderForCausalLM)
        tapes = encoder.model.taped._tapes
        assert tapes and None not in tapes.values(), "Python computes the layers one by one"


@pytest.mark.parametrize("family", ENCODER_CONFIGS)
def test_bfloat16(family: str, tmp_path: Path) -> None:
    """At most twice as far from the truth as transformers in bfloat16."""
    folder = write_encoder(ENCODER_CONFIGS[family][0], tmp_path / "model", seed=5)
    texts = texts_of(LENGTHS)
    truth = reference_hidden(folder, texts)
    limit = 2 * difference(reference_hidden(folder, texts, dtype=torch.bfloat16), truth)
    assert difference(Encoder(folder, torch.bfloat16)(texts), truth) < limit


@KERNELS
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["bert", "mpnet", "albert", "modernbert", "nomic_bert", "gemma3"])
def test_a_text_is_the_same_bit_for_bit_in_any_batch(
    family: str, dtype: torch.dtype, quantization: str | None, tmp_path: Path
) -> None:
    folder = write_encoder(ENCODER_CONFIGS[family][0], tmp_path / "model", seed=6)
    texts = texts_of(LENGTHS)
    encoder = Encoder(folder, dtype, quantization=QuantizationConfig(layers=quantization))
    together = encoder(texts)
    for text, found in zip(texts, together, strict=True):
        assert torch.equal(encoder([text])[0], found)
    assert all(map(torch.equal, encoder(texts[::-1]), together[::-1]))


@KERNELS
@pytest.mark.parametrize(("quantization", "least"), [("int8", 0.999), ("int4", 0.95)])
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_quantized_weights(family: str, quantization: str, least: float, tmp_path: Path) -> None:
    folder = write_encoder(ENCODER_CONFIGS[family][0], tmp_path / "model", seed=7)
    texts = texts_of(LENGTHS)
    found = Encoder(folder, quantization=QuantizationConfig(layers=quantization))(texts)
    for ours, truth in zip(found, reference_hidden(folder, texts), strict=True):
        assert F.cosine_similarity(ours.mean(0), truth.mean(0), dim=0) > least


@pytest.mark.parametrize("family", ["bert", "roberta", "nomic_bert"])
def test_token_types(family: str, tmp_path: Path) -> None:
    index = 1 if family == "roberta" else 0
    folder = write_encoder(ENCODER_CONFIGS[family][index], tmp_path / "model", seed=8)
    texts = texts_of(LENGTHS)
    types = [[int(place >= len(text) // 2) for place in range(len(text))] for text in texts]
    truth = reference_hidden(folder, texts, types=types)
    encoder = Encoder(folder)
    assert difference(encoder(texts, types), truth) < 1e-4
    assert difference(encoder(texts), truth) > 1e-2


@pytest.mark.parametrize(
    "kind", [AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoModelForTokenClassification]
)
@pytest.mark.parametrize("family", [family for family in ENCODER_CONFIGS if family != "gemma3"])
def test_checkpoints_with_a_head(family: str, kind: Any, tmp_path: Path) -> None:
    """Their names begin with the name of the encoder. Heads are left unread."""
    folder = write_encoder(ENCODER_CONFIGS[family][0], tmp_path / "model", seed=9, kind=kind)
    texts = texts_of((5, 30))
    assert difference(Encoder(folder)(texts), reference_hidden(folder, texts)) < 1e-4


def test_layers_that_share_their_weights_hold_them_once(tmp_path: Path) -> None:
    encoder = Encoder(write_encoder(ENCODER_CONFIGS["albert"][1], tmp_path / "model", seed=1))
    assert isinstance(encoder.model, DecoderForCausalLM)
    layers: Any = encoder.model.layers  # Any: of torch
    for part in (lambda layer: layer.self_attn.qkv_proj, lambda layer: layer.mlp.down_proj):
        assert [part(layer) is part(layers[0]) for layer in layers] == [True, True, True, False, False]
        assert part(layers[3]) is part(layers[4])


def test_old_names_of_norms_and_stored_buffers(tmp_path: Path) -> None:
    folder = write_encoder(ENCODER_CONFIGS["bert"][0], tmp_path / "model", seed=10)
    texts = texts_of((5, 30))
    truth = reference_hidden(folder, texts)
    tensors = load_file(folder / "model.safetensors")
    old = {
        "bert."
        + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    assert old.keys() & {"bert.embeddings.LayerNorm.gamma", "bert.encoder.layer.0.output.LayerNorm.beta"}
    old["bert.embeddings.position_ids"] = torch.arange(512)[None]
    save_file(old, folder / "model.safetensors", {"format": "pt"})
    assert difference(Encoder(folder)(texts), truth) < 1e-4


def test_the_published_form_of_nomic_bert(tmp_path: Path) -> None:
    """Its config.json has other names of fields."""
    folder = write_encoder(ENCODER_CONFIGS["nomic_bert"][0], tmp_path / "model", seed=11)
    texts = texts_of(LENGTHS)
    truth = reference_hidden(folder, texts)
    config = json.loads((folder / "config.json").read_text())
    published = {
        "architectures": ["NomicBertModel"],
        "model_type": "nomic_bert",
        "n_embd": config["hidden_size"],
        "n_head": config["num_attention_heads"],
        "n_layer": config["num_hidden_layers"],
        "n_inner": config["intermediate_size"],
        "n_positions": 8192,
        "max_trained_positions": 512,
        "layer_norm_epsilon": config["layer_norm_eps"],
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "activation_function": "swiglu",
        "prenorm": False,
        "qkv_proj_bias": False,
        "type_vocab_size": 2,
        "vocab_size": config["vocab_size"],
    }
    (folder / "config.json").write_text(json.dumps(published))
    encoder = Encoder(folder)
    assert encoder.architecture.max_position_embeddings == 512
    assert difference(encoder(texts), truth) < 1e-4
    for name, value in (("prenorm", True), ("rotary_emb_interleaved", True), ("activation_function", "gelu")):
        with pytest.raises(UnsupportedModelError, match=name):
            parse_architecture({**published, name: value})


@pytest.mark.parametrize("family", ENCODER_CONFIGS)
def test_two_ranks_together_are_the_whole(family: str, tmp_path: Path) -> None:
    folder = write_encoder(ENCODER_CONFIGS[family][0], tmp_path / "model", seed=12)
    texts = texts_of(LENGTHS)
    truth = reference_hidden(folder, texts)
    worlds = ThreadWorlds(RankLayout(2, 1), timeout_seconds=60)

    def hidden(rank: int) -> list[Tensor]:
        return Encoder(folder, tp=worlds.of(rank).tensor_parallel_group("model"))(texts)

    with ThreadPoolExecutor(2) as ranks:
        first, second = ranks.map(hidden, range(2))
    assert difference(first, truth) < 1e-4
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("family", ENCODER_CONFIGS)
def test_two_stages_one_after_the_other_are_the_whole(family: str, tmp_path: Path) -> None:
    folder = write_encoder(ENCODER_CONFIGS[family][0], tmp_path / "model", seed=13)
    texts = texts_of(LENGTHS)
    num_layers = len(Encoder(folder).architecture.layers)
    first, second = (Encoder(folder, stage=pipeline_stage((1, num_layers - 1), index)) for index in range(2))
    for _ in range(2):
        passed = first.run_stage(texts)
        assert isinstance(passed, IntermediateTensors)
        found = second.run_stage(texts, intermediate=passed)
        assert isinstance(found, Tensor)
        parts = list(torch.split(found, [len(text) for text in texts]))
        assert difference(parts, reference_hidden(folder, texts)) < 1e-4
