"""While a model is loaded, no large weight is in memory twice: the peak of the process's memory, pages of mapped files too, is
hardly above the memory that the loaded model takes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from inflight.config.engine import ModelConfig, QuantizationConfig
from inflight.config.gguf_config import read_model_config
from inflight.config.parse_architecture import parse_architecture
from inflight.device import host_memory
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.kernels import weight_rows
from inflight.kernels.cpu.library import load_kernels
from inflight.layers import moe
from inflight.model_loader import streamed_rows
from inflight.model_loader.loader import load_model
from inflight.models.causal_lm import CausalLM
from tests.conftest import FULL
from tests.support.full_context_attention import FullContextAttention
from tests.support.gguf_experts import make_mixture
from tests.support.gguf_files import Stored, write_gguf

VOCAB_SIZE, HIDDEN_SIZE = 1 << 16, 256
MIB = 1 << 20
SLACK = 12 * MIB  # a large weight has 16 million elements
_SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN_SIZE, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
HEAD = Qwen3Config(**_SIZES, vocab_size=VOCAB_SIZE)
TIED = Qwen3Config(**{**_SIZES, "tie_word_embeddings": True}, vocab_size=VOCAB_SIZE)
MLP = Qwen3Config(**{**_SIZES, "num_hidden_layers": 1, "intermediate_size": VOCAB_SIZE // 2}, vocab_size=203)
EXPERTS = Qwen3MoeConfig(
    **_SIZES, vocab_size=203, num_experts=128, moe_intermediate_size=128, num_experts_per_tok=2, norm_topk_prob=True
)


def written(
    config: PreTrainedConfig, dtype: torch.dtype = torch.bfloat16, *, stacked: bool = False
) -> Callable[[Path], Path]:
    """`stacked`: all experts of a layer are in one tensor, as in Qwen3.5's files."""

    def write(folder: Path) -> Path:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
        if config.tie_word_embeddings:
            del shapes["lm_head.weight"]
        for name in [name for name in shapes if ".experts." in name and not stacked]:
            num_experts, *shape = shapes.pop(name)
            prefix, _, key = name.rpartition(".")
            keys = ("gate", "up") if key.startswith("gate_up") else ("down",)
            of_one = (shape[0] // len(keys), shape[1])
            shapes |= {f"{prefix}.{i}.{each}_proj.weight": of_one for i in range(num_experts) for each in keys}
        config.save_pretrained(folder)
        save_file(
            {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}, folder / "model.safetensors"
        )
        return folder

    return write


def gguf(kind: int, block_bytes: int, block_size: int) -> Callable[[Path], Path]:
    """A file whose embedding and head are of this type of blocks."""

    def write(folder: Path) -> Path:
        _, keys, tensors = make_mixture(folder, "qwen3moe", {})
        table = Stored(
            kind, bytes(VOCAB_SIZE * HIDDEN_SIZE // block_size * block_bytes), torch.empty(VOCAB_SIZE, HIDDEN_SIZE)
        )
        for name in ("token_embd.weight", "output.weight"):
            assert tensors[name].weight.shape[1] == HIDDEN_SIZE
            tensors[name] = table
        return write_gguf(folder / "model.gguf", keys, tensors)

    return write


def load(path: Path, quantization: QuantizationConfig) -> CausalLM:
    config = ModelConfig(
        folder=path,
        name="x",
        architecture=parse_architecture(read_model_config(path)),
        dtype="bfloat16",
        max_model_len=64,
        load_format="gguf" if path.is_file() else "safetensors",
        seed=0,
        fingerprint="",
        quantization=quantization,
    )
    backend: Any = FullContextAttention()  # Any: a stand-in
    return load_model(config, device=torch.device("cpu"), backend=backend, tp=TensorParallelGroup())


def peak_above_the_rest(path: Path, quantization: QuantizationConfig) -> int:
    """Bytes between the highest use of memory while the model was loaded and its use afterwards."""
    _settle()
    host_memory.reset_peak()
    before = host_memory.resident_bytes()
    if host_memory.peak_resident_bytes() > before + MIB:
        pytest.skip("this system does not let a process reset its peak of memory")
    model = load(path, quantization)
    peak = host_memory.peak_resident_bytes()
    _settle()
    after = host_memory.resident_bytes()
    del model
    assert after > before + MIB
    return peak - after


def _settle() -> None:
    gc.collect()
    host_memory.call_c_library("malloc_trim", 0)


PLAIN, INT8, INT4 = (QuantizationConfig(layers=each, head=each) for each in (None, "int8", "int4"))
CASES: dict[str, tuple[Callable[[Path], Path], QuantizationConfig]] = {
    "bf16": (written(HEAD), PLAIN),
    "of float32": (written(HEAD, torch.float32), PLAIN),
    "int8": (written(HEAD), INT8),
    "int4": (written(HEAD), INT4),
    "int4 of float32": (written(HEAD, torch.float32), INT4),
    "tied, int8": (written(TIED), INT8),
    "MLP": (written(MLP), PLAIN),
    "MLP, int8": (written(MLP), INT8),
    "MLP, int4": (written(MLP), INT4),
    "GGUF, Q4_0": (gguf(2, 18, 32), PLAIN),
    "GGUF, Q6_K": (gguf(14, 210, 256), PLAIN),
    "GGUF, BF16": (gguf(30, 2, 1), PLAIN),
    "GGUF, BF16 to int8": (gguf(30, 2, 1), INT8),
    "experts": (written(EXPERTS), PLAIN),
    "experts, int8": (written(EXPERTS), INT8),
    "experts in one tensor": (written(EXPERTS, stacked=True), PLAIN),
    "experts in one tensor, int4": (written(EXPERTS, stacked=True), INT4),
}


OFTEN = ("bf16", "int4 of float32", "tied, int8", "MLP, int8", "GGUF, Q6_K", "experts", "experts in one tensor, int4")


@pytest.mark.skipif(load_kernels() is None, reason="no C++ kernels here")
@pytest.mark.parametrize("case", CASES if FULL else OFTEN)
def test_the_peak_is_hardly_above_the_model(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, quantization = CASES[case]
    path = write(tmp_path)
    for module in (weight_rows, streamed_rows):
        monkeypatch.setattr(module, "LARGE", MIB)
    monkeypatch.setattr(weight_rows, "AT_ONCE", MIB // 4)
    monkeypatch.setattr(moe, "_GROUP_BYTES", 2 * MIB)
    load(path, quantization)  # what is imported and cached at the first time counts no more
    above = peak_above_the_rest(path, quantization)
    print(f"{case}: {above / MIB:.1f} MiB above the model")
    assert above < SLACK
