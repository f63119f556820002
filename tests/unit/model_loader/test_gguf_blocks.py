"""Types of GGUF tensors against the package gguf, which llama.cpp's authors write: random blocks of every type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf import dequantize as dequantize_by_gguf

from inflight.config.gguf_file import GgufTensor
from inflight.config.gguf_types import GgufType, gguf_types
from inflight.config.weight_room import Room, find_room, gibibytes
from inflight.kernels.cpu.library import load_kernels
from inflight.kernels.cpu.packing import describe_integers, packed_bytes, with_zero_in_the_middle
from inflight.kernels.quantized_weight import QuantizedWeight
from inflight.model_loader.gguf_blocks import FLOATS, GRIDS, UNPACKERS, unpack_blocks
from inflight.model_loader.gguf_memory import mean_bits, memory_notice
from tests.support.gguf_files import floats, quantized, write_gguf

TYPES = {each.name: each for each in gguf_types().values()}
# (offset of a float16 in a block, of which the random bits must not be infinite or NaN); the last is from the block's end
HALVES = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "TQ1_0": (52,), "TQ2_0": (64,), "MXFP4": (), "NVFP4": (), "IQ1_M": (),
}  # fmt: skip


def random_rows(tensor_type: GgufType, num_rows: int, num_blocks: int, random: np.random.Generator) -> np.ndarray:
    """All bits are random, but scales are finite numbers of a usual size."""
    blocks = random.integers(0, 256, (num_rows, num_blocks, tensor_type.block_bytes), dtype=np.uint8)
    for start in HALVES.get(tensor_type.name, (0,)):
        scales = (random.standard_normal((num_rows, num_blocks, 1)) / 64).astype(np.float16)
        blocks[..., start : start + 2] = scales.view(np.uint8)
    if tensor_type.name == "MXFP4":
        blocks[..., 0] = random.integers(90, 140, blocks.shape[:2])
        blocks[0, :3, 0] = 0, 1, 2  # numbers near the smallest float32
    if tensor_type.name == "IQ1_M":  # the float16 is in the high halves of the last four words
        scale = np.full(blocks.shape[:2], np.float16(0.01).view(np.uint16))
        for word in range(4):
            blocks[..., 49 + 2 * word] = blocks[..., 49 + 2 * word] & 15 | (scale >> 4 * word & 15) << 4
    return blocks.reshape(num_rows, -1)


def weights_of(name: str, rows: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(dequantize_by_gguf(rows, GGMLQuantizationType[name]))


@pytest.mark.parametrize("name", sorted(TYPES.keys() - FLOATS.keys()))
def test_all_bits_are_equal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.model_loader.gguf_blocks._AT_ONCE", 3000)  # some rows at a time
    rows = random_rows(TYPES[name], 7, 8, np.random.default_rng(0))
    weight = unpack_blocks(TYPES[name], rows)
    assert isinstance(weight, QuantizedWeight)
    assert torch.equal(weight.dequantize(), weights_of(name, rows))
    assert int(weight.values.max()) < 2**weight.bits
    assert weight.bits == TYPES[name].bits_in_memory
    assert bool(weight.table) == (name in ("IQ4_NL", "IQ4_XS", "MXFP4"))
    assert name in UNPACKERS or name in GRIDS


@pytest.mark.skipif(load_kernels() is None, reason="no C++ kernels here")
@pytest.mark.parametrize("name", sorted(TYPES.keys() - FLOATS.keys()))
def test_the_bytes_of_the_kernels_are_known(name: str) -> None:
    """What packing takes, scales and offsets too: a model that passes the check fits."""
    kernels = load_kernels()
    assert kernels is not None
    weight = unpack_blocks(
        TYPES[name], random_rows(TYPES[name], 64, 2048 // TYPES[name].block_size, np.random.default_rng(0))
    )
    assert isinstance(weight, QuantizedWeight)
    has_offsets = with_zero_in_the_middle(weight)[1] is not None
    described = describe_integers(weight, has_offsets=has_offsets, scale=1.0, gate=None)
    assert packed_bytes(kernels, described) * 8 == TYPES[name].bits_with_scales * weight.values.numel()


@pytest.mark.parametrize("name", GRIDS)
def test_a_type_without_a_table_is_quantized_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each weight is off by at most half a step, which is 1/127 of the largest in its group of 32."""
    monkeypatch.delitem(GRIDS, name)
    rows = random_rows(TYPES[name], 7, 8, np.random.default_rng(0))
    weight = unpack_blocks(TYPES[name], rows)
    truth = weights_of(name, rows)
    assert isinstance(weight, QuantizedWeight) and weight.format == (8, 32, False)
    error = (weight.dequantize() - truth).abs().view(7, -1, 32).amax(dim=2)
    largest = truth.abs().view(7, -1, 32).amax(dim=2)
    assert bool((error <= largest / 254 * (1 + 1e-4)).all())
    assert 0 < float((weight.dequantize() - truth).norm() / truth.norm()) < 0.006


def test_a_group_of_zeros() -> None:
    rows = np.zeros((2, TYPES["IQ2_XXS"].block_bytes), np.uint8)
    assert torch.equal(unpack_blocks(TYPES["IQ2_XXS"], rows).dequantize(), torch.zeros(2, 256))


@pytest.mark.parametrize("name", FLOATS)
def test_types_of_floats(name: str) -> None:
    rows = torch.randn(3, 8).to(FLOATS[name]).view(torch.uint8).numpy()
    weight = unpack_blocks(TYPES[name], rows)
    assert isinstance(weight, torch.Tensor) and weight.dtype == FLOATS[name]
    assert torch.equal(weight.float(), weights_of(name, rows))
    assert weight.element_size() * 8 == TYPES[name].bits_in_memory


def test_memory_is_known_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def tensors(**types: str) -> dict[str, GgufTensor]:
        return {f"{name}.weight": GgufTensor(Path("x"), (512, 1024), TYPES[kind], 0) for name, kind in types.items()}

    assert mean_bits(tensors(a="Q4_K", b="Q6_K", token_embd="F32")) == (5 + 9) / 2
    assert mean_bits(tensors(a="F32", b="F16", c="Q2_K")) == (16 + 16 + 10) / 3
    assert mean_bits({}) is None
    assert memory_notice(tensors(a="Q4_K", b="Q6_K", c="Q8_0", d="BF16", token_embd="Q2_K")) is None
    assert memory_notice(tensors(a="IQ4_NL", b="IQ4_XS", c="MXFP4")) is None
    notice = memory_notice(tensors(a="Q2_K", b="IQ1_S", c="Q4_K", d="Q2_K"))
    assert notice is not None
    assert notice.startswith("3 tensors (IQ1_S, Q2_K) have 8 bits for each weight in memory")
    in_file = 2 * 2**11 * 84 + 2**11 * 50
    assert notice.endswith(f": {gibibytes(3 * 2**19)}, in the file {gibibytes(in_file)}")
    monkeypatch.delitem(GRIDS, "IQ1_S")
    notice = memory_notice(tensors(a="Q2_K", b="IQ1_S", c="Q4_K", d="Q2_K"))
    assert notice is not None
    assert notice.endswith("; IQ1_S are quantized again, to 8 bits with a scale for each 32 weights")


def test_a_type_that_is_read_needs_more_memory_in_the_sum(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    none: Any = None  # the architecture is not read
    for name, bits in (("Q4_0", 4.5), ("Q5_0", 8.5)):
        table = quantized(name, (3, 64), random)
        tensors = {"a": quantized(name, (64, 64), random), "b": floats(torch.ones(64)), "token_embd.weight": table}
        file = write_gguf(tmp_path / f"{name}.gguf", {}, tensors)
        of_the_rest = 3 * 64 * 2 + int(64 * 64 * bits / 8)
        assert find_room(file, none, "auto", None) == Room(of_the_rest + 64 * 2)
        assert find_room(file, none, "auto", "int4") == Room(of_the_rest + 64 // 2)
