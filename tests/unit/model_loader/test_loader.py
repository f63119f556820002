"""Loading: every layout of files, every dtype, every way in which a checkpoint can be wrong; dummy weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from inflight.config.engine import ModelConfig
from inflight.config.parse_architecture import parse_architecture
from inflight.config.stored_head import resolve_head
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.errors import CheckpointError, ConfigError
from inflight.kernels.cpu.library import load_kernels
from inflight.model_loader.loader import load_model
from inflight.models.causal_lm import CausalLM
from tests.support.full_context_attention import FullContextAttention, run_prompt
from tests.support.full_context_attention import load as load_float32
from tests.support.model_zoo import FAMILY_CONFIGS, write_model

PROMPT = torch.arange(9)
DOWN = "model.layers.1.mlp.down_proj.weight"


def load(folder: Path, *, load_format: str = "safetensors", dtype: str = "float32", seed: int = 0) -> CausalLM:
    architecture = resolve_head(parse_architecture(json.loads((folder / "config.json").read_text())), folder)
    config = ModelConfig(
        folder=folder,
        name="x",
        architecture=architecture,
        dtype=dtype,
        max_model_len=64,
        load_format=load_format,
        seed=seed,
        fingerprint="",
    )
    backend: Any = FullContextAttention()  # Any: a stand-in
    return load_model(config, device=torch.device("cpu"), backend=backend, tp=TensorParallelGroup())


def logits(folder: Path, **arguments: Any) -> Tensor:
    return run_prompt(load(folder, **arguments), PROMPT)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(FAMILY_CONFIGS["qwen3"][0], tmp_path_factory.mktemp("model") / "whole", seed=1)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(FAMILY_CONFIGS["qwen3"][1], tmp_path_factory.mktemp("model") / "tied", seed=1)


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy to be spoilt."""
    return Path(shutil.copytree(written, tmp_path / "model"))


@pytest.fixture
def sharded(folder: Path) -> Path:
    """The same weights in two files and an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    return str(caught.value)


# ---- what is read ----------------------------------------------------------------------------------------------------


def test_shards_with_and_without_an_index_are_the_same_model(written: Path, sharded: Path) -> None:
    truth = logits(written)
    assert torch.equal(logits(sharded), truth)
    (sharded / "model.safetensors.index.json").unlink()
    assert torch.equal(logits(sharded), truth)


def test_shards_as_transformers_writes_them(written: Path, tmp_path: Path) -> None:
    config = FAMILY_CONFIGS["qwen3"][0]
    folder = write_model(config, tmp_path / "shards", seed=1, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert torch.equal(logits(folder), logits(written))


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
def test_the_stored_dtype_is_converted(folder: Path, stored: torch.dtype) -> None:
    def rounded(tensors: dict[str, Tensor], final: torch.dtype) -> None:
        tensors.update({name: tensor.to(stored).to(final) for name, tensor in tensors.items()})

    edit(folder, lambda tensors: rounded(tensors, stored))
    ours = logits(folder)
    edit(folder, lambda tensors: rounded(tensors, torch.float32))
    assert torch.equal(ours, logits(folder))


def test_harmless_extras_are_left_out(folder: Path, tied: Path, tmp_path: Path) -> None:
    truth = logits(folder)
    edit(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert torch.equal(logits(folder), truth)
    copy = Path(shutil.copytree(tied, tmp_path / "tied"))
    truth = logits(copy)
    edit(copy, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert torch.equal(logits(copy), truth)


def test_a_head_that_contradicts_config_json_is_never_left_out(tied: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tied, tmp_path / "tied"))
    edit(copy, lambda tensors: tensors.update({"lm_head.weight": torch.ones(3)}))
    assert "lm_head.weight" in refusal(copy)
    edit(copy, lambda tensors: tensors.update({"lm_head.weight": -tensors["model.embed_tokens.weight"]}))
    untied = Path(shutil.copytree(copy, tmp_path / "untied"))
    config = json.loads((copy / "config.json").read_text())
    (untied / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert torch.equal(logits(copy), logits(untied))


def test_a_decoder_that_was_saved_without_its_head(tied: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tied, tmp_path / "decoder"))
    tensors = load_file(copy / "model.safetensors")
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, copy / "model.safetensors")
    assert torch.equal(logits(copy), logits(tied))


def test_a_tensor_that_the_index_does_not_list(written: Path, sharded: Path, caplog: pytest.LogCaptureFixture) -> None:
    truth = logits(written)
    shard, index = sharded / "model-00001-of-00002.safetensors", sharded / "model.safetensors.index.json"
    tensors = load_file(shard)
    save_file({**tensors, "model.layers.9.old": torch.ones(2)}, shard)
    content = json.loads(index.read_text())
    content["weight_map"].pop(DOWN)  # it is needed, so it is used
    index.write_text(json.dumps(content))
    with caplog.at_level("WARNING"):
        assert torch.equal(logits(sharded), truth)
    assert ["model.layers.9.old" in record.getMessage() for record in caplog.records] == [True]
    index.unlink()
    assert "model.layers.9.old" in refusal(sharded)


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = refusal(folder)
    assert str(folder) in message
    assert "safetensors" in message


def test_a_missing_tensor(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.pop(DOWN))
    assert DOWN in refusal(folder)


def test_a_missing_head(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert "lm_head.weight" in refusal(folder)


def test_many_missing_tensors_are_counted(folder: Path) -> None:
    edit(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.0." in name])
    assert "and 3 more" in refusal(folder)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.bias", "model.layers.2.mlp.up_proj.weight", "x"])
def test_an_extra_tensor(folder: Path, name: str) -> None:
    edit(folder, lambda tensors: tensors.update({name: torch.ones(2)}))
    message = refusal(folder)
    assert name in message
    assert "model.safetensors" in message


@pytest.mark.parametrize(
    "name", [DOWN, "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.q_norm.weight"]
)
def test_a_misshapen_tensor(folder: Path, name: str) -> None:
    edit(folder, lambda tensors: tensors.update({name: tensors[name][:-1].contiguous()}))
    message = refusal(folder)
    shape = load_file(folder / "model.safetensors")[name].shape
    assert all(word in message for word in (name, "model.safetensors", str(list(shape))))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float8_e4m3fn, torch.bool])
def test_a_tensor_that_is_no_float(folder: Path, dtype: torch.dtype) -> None:
    edit(folder, lambda tensors: tensors.update({DOWN: tensors[DOWN].to(dtype)}))
    message = refusal(folder)
    assert DOWN in message
    assert "BF16" in message


def test_a_missing_shard(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    assert "missing, for example model-00002-of-00002.safetensors" in refusal(sharded)


def test_an_index_that_names_the_wrong_file(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][DOWN] = {
        "model-00001-of-00002.safetensors": "model-00002-of-00002.safetensors",
        "model-00002-of-00002.safetensors": "model-00001-of-00002.safetensors",
    }[content["weight_map"][DOWN]]
    index.write_text(json.dumps(content))
    assert DOWN in refusal(sharded)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../a.safetensors"}}']
)
def test_an_index_that_is_none(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in refusal(sharded)


@pytest.mark.parametrize("is_absolute", [False, True])
def test_an_index_leads_to_no_file_outside_of_the_folder(sharded: Path, is_absolute: bool) -> None:
    name = "model-00002-of-00002.safetensors"
    outside = sharded.parent / name
    (sharded / name).rename(outside)
    index = sharded / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(name, str(outside) if is_absolute else f"../{name}"))
    assert "which is not a file of this folder" in refusal(sharded)


def test_a_tensor_in_two_files(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    save_file({DOWN: torch.ones(2)}, sharded / "more.safetensors")
    message = refusal(sharded)
    assert DOWN in message
    assert "more.safetensors" in message


def spoil_length(data: bytes) -> bytes:
    return data[:-1000]


def spoil_header(data: bytes) -> bytes:
    return data[:8] + b"x" + data[9:]


def spoil_header_length(data: bytes) -> bytes:
    return (2**40).to_bytes(8, "little") + data[8:]


def spoil_offsets(data: bytes) -> bytes:
    """One tensor claims the bytes of another."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header[DOWN]["data_offsets"] = header["model.norm.weight"]["data_offsets"]
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


@pytest.mark.parametrize(
    "spoil",
    [spoil_length, spoil_header, spoil_header_length, spoil_offsets, lambda data: b"", lambda data: data[:5]],
    ids=["truncated", "header", "header length", "offsets", "empty", "five bytes"],
)
def test_a_corrupt_file(folder: Path, spoil: Callable[[bytes], bytes]) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(spoil(file.read_bytes()))
    message = refusal(folder)
    assert str(file) in message
    assert "corrupt" in message


# ---- dummy weights ---------------------------------------------------------------------------------------------------


def test_dummy_weights_need_a_config_only_and_follow_the_seed(written: Path, tmp_path: Path) -> None:
    shutil.copy(written / "config.json", tmp_path)
    first, again, other = (logits(tmp_path, load_format="dummy", seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    assert first.std() > 0
    assert logits(tmp_path, load_format="dummy", dtype="bfloat16").isfinite().all()


def test_dummy_weights_are_as_wide_as_promised(written: Path) -> None:
    model = load(written, load_format="dummy")
    products = {name: module for name, module in model.named_modules() if hasattr(module, "multiply")}
    assert len(products) >= 8
    for name, module in products.items():
        if "gate_up" not in name:  # which is no product alone
            size = module.in_features if hasattr(module, "in_features") else module.hidden_size
            weight = module.multiply(torch.eye(size), torch.float32)
            assert weight.std().item() == pytest.approx(0.02, rel=0.1) and abs(weight.mean().item()) < 0.002, name
    for name, norm in model.named_parameters():
        if "norm" in name:
            assert (norm == 1).all(), name


# ---- parts of ranks, and promises ------------------------------------------------------------------------------------


def test_a_rank_whose_rows_are_all_padding(tmp_path: Path) -> None:
    """Five tokens over four ranks: two rows each, and the last rank has none."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=5, num_key_value_heads=4, head_dim=8, tie_word_embeddings=False, **sizes)
    folder = write_model(config, tmp_path / "model", seed=1)
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    for rank, held in enumerate((table[:2], table[2:4], table[4:], table[5:])):
        model = load_float32(folder, tp=TensorParallelGroup(4, rank))
        weight = dict(model.named_parameters())["embed_tokens.weight"]
        assert torch.equal(weight[: len(held)], held) and not weight[len(held) :].any() and len(weight) == 2


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        (0, "its attention is not computed by the C"),
        (2, r"its linear layers are not computed by the C\+\+ kernels"),  # a part of its heads has six features
    ],
)
@pytest.mark.skipif(load_kernels() is None, reason="needs the C++ kernels")
def test_weights_of_heads_decide_about_batch_invariance_too(tmp_path: Path, index: int, reason: str) -> None:
    folder = write_model(FAMILY_CONFIGS["deepseek_v2"][index], tmp_path / "model", seed=1)
    with pytest.raises(ConfigError, match=reason):
        load_float32(folder, batch_invariant=True)


def test_only_what_is_quantized_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        load(folder)
    assert not caplog.records
