"""Files that llama.cpp itself has quantized, in every type that it writes without an importance matrix.

The truth: transformers with the weights that the package gguf reads from the same file. Needs the package llama-cpp-python,
which is no part of the tests' environment: pip install --no-binary llama-cpp-python llama-cpp-python (it is compiled for some
minutes).
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf import dequantize as dequantize_by_gguf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.full_context_attention import run_prompt
from tests.support.gguf_experts import CONFIGS as MIXTURES
from tests.support.gguf_experts import INTERLEAVED as INTERLEAVED_MIXTURES
from tests.support.gguf_experts import put_weights, write_mixture
from tests.support.gguf_files import Number
from tests.support.gguf_models import INTERLEAVED, deinterleave, stored_name, write_pair
from tests.unit.model_loader.test_gguf_source import load

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="needs llama-cpp-python, which is compiled for some minutes"
)

PROMPT = torch.arange(3, 40)
# without an importance matrix; names of llama.cpp's file types
FILE_TYPES = (
    "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K_S Q3_K_M Q3_K_L Q4_K_S Q4_K_M Q5_K_S Q5_K_M Q6_K IQ3_S IQ3_M IQ4_NL IQ4_XS TQ1_0 "
    "TQ2_0 BF16 F16 MXFP4_MOE"
).split()
_QUANTIZE = """
import sys
import llama_cpp
_, source, target, file_type, keep_split = sys.argv
params = llama_cpp.llama_model_quantize_default_params()
params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{file_type}")
params.nthread = 1
params.keep_split = keep_split == "split"
sys.exit(llama_cpp.llama_model_quantize(source.encode(), target.encode(), params))
"""

_COMPUTE = """
import ctypes, sys
import llama_cpp, numpy
_, path, target, count, vocab_size = sys.argv
model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
params = llama_cpp.llama_context_default_params()
params.n_threads = 1
params.flash_attn_type = params.type_k = params.type_v = 0  # keys and values in float32
context = llama_cpp.llama_init_from_model(model, params)
tokens = (ctypes.c_int32 * int(count))(*range(3, 3 + int(count)))
assert llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, int(count))) == 0
logits = llama_cpp.llama_get_logits_ith(context, -1)
numpy.save(target, numpy.ctypeslib.as_array(logits, shape=(int(vocab_size),)))
"""


def run(program: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-300:]


def quantize(source: Path, target: Path, file_type: str, *, keep_split: bool = False) -> None:
    run(_QUANTIZE, str(source), str(target), file_type, "split" if keep_split else "")


def weights_of(files: list[Path]) -> dict[str, torch.Tensor]:
    """As the package gguf reads them, by their names in the files."""
    tensors = [tensor for file in files for tensor in GGUFReader(file).tensors]
    return {each.name: torch.tensor(dequantize_by_gguf(each.data, each.tensor_type)) for each in tensors}


def logits_of(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(PROMPT[None]).logits[0, -1]
    return logits


def logits_of_transformers(plain: Path, files: list[Path], architecture: str) -> torch.Tensor:
    """The folder `plain` gets the weights in `files`."""
    stored = weights_of(files)
    weights = load_file(plain / "model.safetensors")
    for name, weight in weights.items():
        stem, whole = stored_name(architecture, name)
        found = stored[whole].view(weight.shape)
        is_interleaved = architecture in INTERLEAVED and stem in ("attn_q", "attn_k")
        weights[name] = (deinterleave(found, 64) if is_interleaved else found).contiguous()
    save_file(weights, plain / "model.safetensors", {"format": "pt"})
    return logits_of(plain)


@pytest.mark.parametrize("file_type", FILE_TYPES)
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_a_file_of_llama_cpp(
    tmp_path: Path, file_type: str, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, source = write_pair(tmp_path, architecture, {})
    target = tmp_path / "quantized.gguf"
    quantize(source, target, file_type)
    truth = logits_of_transformers(plain, [target], architecture)
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", "off")  # they quantize activations, too
    ours = run_prompt(load(target), PROMPT)[-1]
    assert float((ours - truth).norm() / truth.norm()) < 1e-5


@pytest.mark.parametrize("file_type", ["Q4_K_M", "Q2_K", "IQ4_XS", "IQ3_S", "TQ2_0", "MXFP4_MOE"])
@pytest.mark.parametrize("architecture", sorted(MIXTURES))
def test_experts_of_llama_cpp(
    tmp_path: Path, file_type: str, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, source = write_mixture(tmp_path, architecture, {})
    target = tmp_path / "quantized.gguf"
    quantize(source, target, file_type)
    put_weights(plain, architecture, weights_of([target]))
    truth = logits_of(plain)
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", "off")
    ours = run_prompt(load(target), PROMPT)[-1]
    assert float((ours - truth).norm() / truth.norm()) < 1e-5


@pytest.mark.parametrize("architecture", sorted(MIXTURES))
def test_llama_cpp_computes_the_same(tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the keys mean to it what they mean here, and experts are weighted in the same way."""
    metadata: dict[str, Any] = {"tokenizer.ggml.model": "no_vocab", f"{architecture}.vocab_size": Number("I", 203)}
    if architecture in INTERLEAVED_MIXTURES:
        metadata[f"{architecture}.rope.dimension_count"] = Number("I", 64)
    _, file = write_mixture(tmp_path, architecture, {}, metadata=metadata)
    run(_COMPUTE, str(file), str(tmp_path / "logits.npy"), str(len(PROMPT)), "203")
    theirs = torch.from_numpy(np.load(tmp_path / "logits.npy"))
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", "off")
    ours = run_prompt(load(file), PROMPT)[-1]
    assert float((ours - theirs).norm() / theirs.norm()) < 2e-5


def test_parts_of_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the parts that the tests write, and keeps them apart."""
    plain, first = write_pair(tmp_path, "qwen3", {}, num_parts=3)
    quantize(first, tmp_path / "quantized", "Q4_K_M", keep_split=True)
    files = sorted(tmp_path.glob("quantized-*.gguf"))
    assert [file.name for file in files] == [f"quantized-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    truth = logits_of_transformers(plain, files, "qwen3")
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", "off")
    ours = run_prompt(load(files[0]), PROMPT)[-1]
    assert float((ours - truth).norm() / truth.norm()) < 1e-5
