"""`file_order`: in which order a GGUF file has the rows and columns of a weight, where it is not the order of the model.

llama.cpp's converter changes the order in two kinds of layers, so that its own kernels are simpler:

- In families such as "llama" (`Family.gguf_interleaves_heads`), within each head of queries and keys: rows i and
  i + head_dim / 2, which are rotated together, become neighbours.
- In the recurrent layers of Qwen3.5 (`Family.gguf_tiles_value_heads`), if a key head has several value heads: the first value
  heads of all key heads come first, then the second ones, and so on.

In Qwen3-Next, the rows of betas and steps are in one tensor, those of each key head in turn.
"""

import math
import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inflight.config.families.family import Family
from inflight.config.mixers import GatedDeltaSpec, MixerSpec
from inflight.kernels.quantized_weight import GROUP_SIZE_MULTIPLE, QuantizedWeight, split_groups

_QUERIES_AND_KEYS = re.compile(r"\.self_attn\.[qk]_proj\.")
BETAS_AND_STEPS = "linear_attn.in_proj_ba.weight"  # two projections of one tensor
_OF_BETAS_AND_STEPS = ("linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight")


@dataclass(frozen=True)
class FileOrder:
    """`rows`: for each row of the model's weight (or element of its vector) its place in the file; `columns`: the same for
    columns, in runs of `run` neighbours. None: the same order."""

    rows: Tensor | None = None
    columns: Tensor | None = None
    run: int = 1


def file_order(name: str, num_rows: int, head_dim: int, mixer: MixerSpec | None, family: Family) -> FileOrder:
    """
    Args:
        name: of the weight in the model.
        num_rows: of the weight, or the elements of the vector.
        head_dim: of attention.
        mixer: of the layer; None if the name is not that of a weight of a layer.
    """
    if family.gguf_interleaves_heads and _QUERIES_AND_KEYS.search(name):
        return FileOrder(_interleaved(num_rows, head_dim))
    if not isinstance(mixer, GatedDeltaSpec) or not family.gguf_tiles_value_heads:
        return FileOrder()
    if mixer.num_value_heads == mixer.num_key_heads:
        return FileOrder()
    part = name.rpartition("linear_attn.")[2]
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        num_before = 2 * mixer.num_key_heads * mixer.key_dim
        before = torch.arange(num_before, dtype=torch.int64, device="cpu")
        return FileOrder(torch.cat((before, num_before + _tiled(mixer, mixer.value_dim))))
    if part == "in_proj_z.weight":
        return FileOrder(_tiled(mixer, mixer.value_dim))
    if part in ("in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias"):
        return FileOrder(_tiled(mixer, 1))
    if part == "out_proj.weight":
        return FileOrder(columns=_tiled(mixer, mixer.value_dim), run=mixer.value_dim)
    return FileOrder()


def rows_of_betas_and_steps(mixer: GatedDeltaSpec) -> dict[str, Tensor]:
    """The two projections in the tensor `BETAS_AND_STEPS` -> their rows in it."""
    per_key_head = mixer.num_value_heads // mixer.num_key_heads
    places = torch.arange(2 * mixer.num_value_heads, dtype=torch.int64, device="cpu").view(-1, 2, per_key_head)
    return {name: places[:, index].flatten() for index, name in enumerate(_OF_BETAS_AND_STEPS)}


def select_columns(weight: Tensor | QuantizedWeight, columns: Tensor, run: int) -> Tensor | QuantizedWeight:
    """Returns the weight whose column i is column `columns[i]` of `weight`. `columns` consists of runs of `run` neighbours, and
    each run begins at a multiple of `run`. If groups of weights would become too small, the result is in floats."""
    if isinstance(weight, Tensor):
        return weight[:, columns]
    values = weight.values[:, columns]
    if weight.is_symmetric:
        return replace(weight, values=values)
    group_size = math.gcd(weight.group_size, run)
    if group_size % GROUP_SIZE_MULTIPLE[8]:
        return weight.dequantize()[:, columns]
    if group_size % GROUP_SIZE_MULTIPLE[weight.bits]:
        weight = replace(weight.without_table(), bits=8)
        values = weight.values[:, columns]
    groups = columns[::group_size] // group_size
    return split_groups(weight, group_size).changed(values, lambda each: each[:, groups])


def _interleaved(num_rows: int, head_dim: int) -> Tensor:
    row = torch.arange(num_rows, dtype=torch.int64, device="cpu")
    half = row % head_dim // (head_dim // 2)
    place = row % (head_dim // 2)
    return row - row % head_dim + 2 * place + half


def _tiled(mixer: GatedDeltaSpec, size: int) -> Tensor:
    """The places of all rows, if a value head has `size` of them."""
    per_key_head = mixer.num_value_heads // mixer.num_key_heads
    heads = torch.arange(mixer.num_value_heads, dtype=torch.int64, device="cpu").view(per_key_head, -1).T.flatten()
    return (heads[:, None] * size + torch.arange(size, dtype=torch.int64, device="cpu")).flatten()
