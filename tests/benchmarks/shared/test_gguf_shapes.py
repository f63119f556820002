"""Quantized files of real shapes: written block by block, they are models that the engine reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from benchmarks.shared import gguf_shapes
from benchmarks.shared.gguf_shapes import GGUF_SHAPES, GgufShape, blocks_of, gguf_shape
from benchmarks.shared.models import model_folder, weight_bytes
from benchmarks.speed.roofline import STORED, Machine, read_needs
from tests.support.full_context_attention import run_prompt
from tests.unit.model_loader.test_gguf_source import load

SMALL = {"hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "num_experts": 8, "top_k": 2, "vocab_size": 320}
MACHINE = Machine(num_threads=1, read=1e9, read_huge_pages=1e9, fp32=1e20, bf16=None, int8=None)


def small(name: str) -> GgufShape:
    return replace(GGUF_SHAPES[name], num_layers=2, expert_size=256, **SMALL)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K", "Q6_K", "MXFP4"])
def test_random_blocks_are_weights_of_a_usual_size(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_shapes, "NOISE_BYTES", 1 << 16)
    blocks = blocks_of(kind, np.random.default_rng(0)).reshape(1, -1)
    weights = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    assert abs(weights.mean()) < 0.003 and 0.019 < weights.std() < 0.024
    with pytest.raises(ValueError, match="F16"):
        blocks_of("F16", np.random.default_rng(0))


@pytest.mark.parametrize("name", GGUF_SHAPES)
def test_a_file_is_a_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_shapes, "NOISE_BYTES", 1 << 16)
    monkeypatch.setitem(GGUF_SHAPES, name, small(name))
    file = model_folder(f"{name}:1", tmp_path)
    assert file == model_folder(str(file), tmp_path) and [*tmp_path.iterdir()] == [file]
    logits = run_prompt(load(file), torch.arange(3, 12))
    assert logits.shape == (9, 320) and bool(logits.isfinite().all()) and float(logits.std()) > 0.1

    whole = model_folder(name, tmp_path)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(whole).tensors}
    assert kinds["blk.1.ffn_gate_inp.weight"] == kinds["output_norm.weight"] == "F32"
    if name == "qwen3-30b-a3b":
        assert [kinds[f"blk.{layer}.ffn_down_exps.weight"] for layer in (0, 1)] == ["Q4_K", "Q6_K"]
        assert (kinds["blk.1.ffn_up_exps.weight"], kinds["output.weight"]) == ("Q4_K", "Q6_K")
    elif name == "qwen3-30b-a3b-q4_0":
        assert (kinds["blk.1.ffn_down_exps.weight"], kinds["output.weight"]) == ("Q4_0", "Q6_K")
    else:
        assert (kinds["blk.1.ffn_down_exps.weight"], kinds["blk.1.attn_q.weight"]) == ("MXFP4", "Q8_0")

    needs = read_needs(whole)
    assert needs.stored_bytes_read is not None
    one, every = needs.stored_bytes_read(1), needs.stored_bytes_read(100_000)
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(whole).tensors}
    experts = sum(size for key, size in sizes.items() if "_exps.weight" in key)
    assert every == pytest.approx(sum(sizes.values()) - sizes["token_embd.weight"])
    assert every - one == pytest.approx(0.75 * experts, rel=0.01)  # a token has 2 of 8 experts
    assert weight_bytes(whole) > every
    seconds = needs.step_seconds(MACHINE, STORED, tokens=1, rows=1, cached=0, pairs=1)
    assert seconds == pytest.approx(one / 1e9)


def test_what_is_no_shape_is_refused(tmp_path: Path) -> None:
    assert gguf_shape("moe-a") is None and gguf_shape("moe-a:3") is None
    shape = gguf_shape("gpt-oss-20b:6")
    assert shape is not None and shape.num_layers == 6
    for layers in ("0", "25", "x", "-1"):
        with pytest.raises(SystemExit, match="1 to 24 layers"):
            model_folder(f"gpt-oss-20b:{layers}", tmp_path)


def test_an_unfinished_file_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(shape: GgufShape, path: Path) -> None:
        path.write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(gguf_shapes, "write_gguf", fail)
    with pytest.raises(OSError, match="disk full"):
        model_folder("gpt-oss-20b:1", tmp_path)
    assert [*tmp_path.iterdir()] == []
