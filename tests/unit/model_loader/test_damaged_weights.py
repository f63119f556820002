"""Checkpoints of every format with one damaged tensor: one that is missing, has another name, another shape or another dtype.

Each is refused by one `CheckpointError` with the file and the name that the tensor has in it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, MixtralConfig

from inflight.errors import CheckpointError
from tests.conftest import FULL
from tests.support.float8_checkpoints import write_float8
from tests.support.full_context_attention import load
from tests.support.gguf_experts import make_mixture
from tests.support.gguf_files import Stored, write_gguf
from tests.support.model_zoo import FAMILY_CONFIGS, VOCAB_SIZE, write_model
from tests.support.mxfp4_checkpoints import write_mxfp4
from tests.support.quantized_checkpoints import Drawn, awq, draw, gptq, int_quantized, pack_quantized

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
DENSE = LlamaConfig(**_SIZES)
MIXTURE = MixtralConfig(**_SIZES, num_local_experts=3, num_experts_per_tok=2, sliding_window=None)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
_Q8_0 = 8
_NUM_DRAWN = 6  # cases of each format; all of them with "full"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def compressed(layout: str, bits: int, kind: str = "int", **weights: Any) -> dict[str, Any]:
    scheme = {"num_bits": bits, "type": kind, "strategy": "group", "group_size": 32, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    }  # fmt: skip


@dataclass
class Checkpoint:
    """A model in `folder` that can be written again and again, with other tensors.

    `optional`: tensors without which it is another model, but not a damaged one.
    """

    path: Path
    tensors: dict[str, Any]  # Tensor, or `Stored` in GGUF files
    write: Callable[[dict[str, Any]], object]
    optional: tuple[str, ...] = ()


def _safetensors(folder: Path) -> Checkpoint:
    file = folder / "model.safetensors"
    return Checkpoint(folder, load_file(file), lambda tensors: save_file(tensors, file, {"format": "pt"}))


def _packed(
    config: Any, quantization: dict[str, Any], pack: Callable[[Drawn], dict[str, Tensor]], bits: int = 4
) -> Any:
    def write(folder: Path) -> Checkpoint:
        write_model(config, folder, seed=1)
        weights = load_file(folder / "model.safetensors")
        numbers = np.random.default_rng(1)
        packed: dict[tuple[int, ...], dict[str, Tensor]] = {}  # the values do not matter
        for name in [each for each in weights if each.startswith("model.layers.") and weights[each].dim() == 2]:
            if name.endswith("block_sparse_moe.gate.weight"):
                continue
            shape = tuple(weights.pop(name).shape)
            if shape not in packed:
                packed[shape] = pack(draw(numbers, *shape, bits=bits, group_size=32))
            module = name.removesuffix(".weight")
            weights |= {f"{module}.{suffix}": tensor.clone() for suffix, tensor in packed[shape].items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        _quantize_config(folder, quantization)
        return _safetensors(folder)

    return write


def _quantize_config(folder: Path, quantization: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))


def _plain(family: str) -> Any:
    return lambda folder: _safetensors(write_model(FAMILY_CONFIGS[family][0], folder, seed=1))


def _float8(config: Any, quantization: dict[str, Any], suffix: str, block: tuple[int, int] | None) -> Any:
    def write(folder: Path) -> Checkpoint:
        plain = write_model(config, folder.parent / f"{folder.name}-plain", seed=1)
        write_float8(plain, folder, quantization, suffix=suffix, block=block)
        return _safetensors(folder)

    return write


def _mxfp4(folder: Path) -> Checkpoint:
    folder.mkdir()
    return _safetensors(write_mxfp4(folder)[1])


def _gguf(architecture: str, **form: bool) -> Any:
    def write(folder: Path) -> Checkpoint:
        folder.mkdir()
        _, keys, tensors = make_mixture(folder, architecture, {}, **form)
        for name, tensor in tensors.items():
            if "_exps" in name or "attn_q.weight" in name:
                tensors[name] = Stored(_Q8_0, bytes(tensor.weight.numel() // 32 * 34), tensor.weight)
        file = folder / "model.gguf"
        # a file without this tensor has a head that is tied to the embedding
        return Checkpoint(file, tensors, lambda changed: write_gguf(file, keys, changed), ("output.weight",))

    return write


CHECKPOINTS: dict[str, Callable[[Path], Checkpoint]] = {
    **{family: _plain(family) for family in ("llama", "mixtral", "qwen2_moe", "gpt_oss", "granitemoe", "ernie4_5_moe")},
    "gptq": _packed(DENSE, GPTQ, gptq),
    "gptq with experts": _packed(MIXTURE, GPTQ, gptq),
    "awq": _packed(DENSE, AWQ, awq),
    "awq with experts": _packed(MIXTURE, AWQ, awq),
    "pack-quantized": _packed(MIXTURE, compressed("pack-quantized", 4, symmetric=False), pack_quantized),
    "int-quantized": _packed(MIXTURE, compressed("int-quantized", 8, symmetric=True), int_quantized, bits=8),
    "fp8 per tensor": _float8(DENSE, FP8, "_scale", None),
    "fp8 per channel": _float8(
        MIXTURE, compressed("float-quantized", 8, "float", strategy="channel", group_size=None), "_scale", (1, 0)
    ),
    "fp8 in blocks": _float8(MIXTURE, {**FP8, "weight_block_size": [128, 128]}, "_scale_inv", (128, 128)),
    "mxfp4": _mxfp4,
    "gguf": _gguf("glm4moe"),
    "gguf of Mixtral": _gguf("llama"),
    "gguf, merged": _gguf("qwen3moe", merged=True),
    "gguf, apart": _gguf("llama", apart=True),
}  # fmt: skip


def _without(tensors: dict[str, Any], name: str) -> None:
    del tensors[name]


def _renamed(tensors: dict[str, Any], name: str) -> None:
    stem, _, last = name.rpartition(".")
    tensors[f"{stem}_x.{last}"] = tensors.pop(name)


def _reshaped(tensors: dict[str, Any], name: str) -> None:
    tensor = tensors[name]
    if isinstance(tensor, Stored):
        rows = tensor.weight.shape[0]
        size = len(tensor.data) // rows
        longer = torch.cat((tensor.weight, tensor.weight[:1]))
        tensors[name] = replace(tensor, data=tensor.data + tensor.data[:size], weight=longer)
    else:
        tensors[name] = torch.cat((tensor, tensor[:1])) if tensor.dim() else tensor.repeat(3)


def _retyped(tensors: dict[str, Any], name: str) -> None:
    tensor = tensors[name]
    if isinstance(tensor, Stored):
        integers = torch.ones(tensor.weight.shape, dtype=torch.int32)
        tensors[name] = Stored(26, integers.numpy().tobytes(), integers)
    else:
        tensors[name] = torch.ones(tensor.shape).to(torch.bool)


DAMAGES = {"missing": _without, "renamed": _renamed, "reshaped": _reshaped, "retyped": _retyped}


def _names(checkpoint: Checkpoint) -> list[str]:
    """Those of the last layer and outside of layers; of the experts those of one."""
    return [
        name for name in checkpoint.tensors if ".0." not in name.replace("experts.0.", "") and "experts.0." not in name
    ]


@pytest.mark.parametrize("kind", sorted(CHECKPOINTS))
def test_a_damaged_tensor_is_refused_by_its_name_in_the_file(kind: str, tmp_path: Path) -> None:
    checkpoint = CHECKPOINTS[kind](tmp_path / "model")
    checkpoint.write(checkpoint.tensors)
    load(checkpoint.path)
    cases = [
        (damage, name)
        for name in _names(checkpoint)
        for damage in DAMAGES
        if not (damage == "missing" and name in checkpoint.optional)
    ]
    problems = []
    for damage, name in cases if FULL else random.Random(kind).sample(cases, _NUM_DRAWN):
        tensors = dict(checkpoint.tensors)
        DAMAGES[damage](tensors, name)
        names = (name, *(tensors.keys() - checkpoint.tensors.keys()))
        checkpoint.write(tensors)
        try:
            load(checkpoint.path)
        except CheckpointError as error:
            message = str(error)
            if not any(each in message for each in names) or str(checkpoint.path) not in message:
                problems.append(f"{damage} {name}: {message}")
        except BaseException as error:
            problems.append(f"{damage} {name}: {type(error).__name__} {error}")
        else:
            problems.append(f"{damage} {name}: it was read")
    assert not problems, "\n".join(problems)
