"""Checkpoints in fp8, written by hand: values times scales as the formats define them, nothing of the loader's code.

drawn = draw_float8(random, (200, 300), block=(128, 128))
tensors = {f"{module}.weight": drawn.values, f"{module}.weight_scale_inv": drawn.scales}
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


@dataclass
class DrawnFloat8:
    """weight[.., n, k] = values[.., n, k] * scales[.., n // block[0], k // block[1]]."""

    values: Tensor  # float8_e4m3fn [.., rows, columns]
    scales: Tensor  # [.., rows of blocks, columns of blocks]
    block: tuple[int, int]

    def weight(self, dtype: torch.dtype) -> Tensor:
        """The exact products, which float64 holds, rounded once."""
        *_, rows, columns = self.values.shape
        row_blocks = torch.arange(rows) // self.block[0]
        column_blocks = torch.arange(columns) // self.block[1]
        exact = self.values.double() * self.scales.double()[..., row_blocks, :][..., column_blocks]
        if dtype == torch.float32:
            return exact.float()
        if dtype == torch.float16:
            return torch.from_numpy(exact.numpy().astype(np.float16))
        # rounded twice; so those are mended that the first rounding may have brought to the wrong side
        once = exact.float()
        rounded = once.to(dtype)
        is_doubtful = (((once.view(torch.int32) & 0xFFFF) - 0x8000).abs() <= 1) & (once.double() != exact)
        for place in is_doubtful.nonzero().tolist():
            rounded[tuple(place)] = nearest(float(exact[tuple(place)]), dtype)
        return rounded


def nearest(number: float, dtype: torch.dtype) -> float:
    """The number of a 16-bit dtype that is nearest to `number`, by exact arithmetic; of two, the one whose last bit is 0."""
    near = torch.tensor(number, dtype=dtype)
    bits = int(near.view(torch.int16))
    candidates = (torch.tensor(each, dtype=torch.int16).view(dtype) for each in (bits, bits - 1, bits + 1))
    exact = Fraction(number)
    return min(
        (float(each) for each in candidates if math.isfinite(each)),
        key=lambda each: (abs(Fraction(each) - exact), int(torch.tensor(each, dtype=dtype).view(torch.int16)) & 1),
    )


def draw_float8(
    random: np.random.Generator, shape: tuple[int, ...], *, block: tuple[int, int], dtype: torch.dtype = torch.float32
) -> DrawnFloat8:
    """Every byte that is a number occurs in a large weight. `dtype`: of the scales."""
    *experts, rows, columns = shape
    numbers = np.array([byte for byte in range(256) if byte & 127 != 127], dtype=np.uint8)
    bits = torch.from_numpy(random.choice(numbers, shape))
    grid = (*experts, -(-rows // block[0]), -(-columns // block[1]))
    scales = torch.from_numpy(random.uniform(0.2, 1.0, grid) / 448).to(dtype)
    return DrawnFloat8(bits.view(torch.float8_e4m3fn), scales, block)


def write_float8(
    plain: Path,
    folder: Path,
    quantization: dict[str, Any],
    *,
    suffix: str,
    block: tuple[int, int] | None,
    keeps: tuple[str, ...] = (),
    dtype: torch.dtype = torch.float32,
) -> None:
    """Writes the model `plain` in fp8 into `folder`, and replaces the weights of `plain` by those that fp8 gives in `dtype`.

    Args:
        suffix: the end of the names of scales.
        block: the rows and columns of a block; None: one scale for a weight; (1, 0): one for each row.
        keeps: modules with one of these words in their names stay floats.
    """
    random = np.random.default_rng(5)
    weights = load_file(plain / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        of_experts = tensor.dim() == 3
        if not ("_proj" in name and tensor.dim() > 1) or any(word in name for word in keeps):
            weights[name] = stored[name] = tensor.to(dtype)
            continue
        rows, columns = tensor.shape[-2:]
        size = (rows, columns) if block is None else (block[0], block[1] or columns)
        drawn = draw_float8(random, tuple(tensor.shape), block=size)
        weights[name] = drawn.weight(dtype)
        scales = drawn.scales
        if block is None:
            scales = scales.reshape(len(tensor)) if of_experts else scales.reshape(())
        stored |= {name: drawn.values, name + suffix: scales}
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    folder.mkdir()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    (plain / "config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
