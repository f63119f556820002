"""`GgufSource`: reads the tensors of a GGUF file under the names and in the row order of a Hugging Face folder."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from inflight.config.architecture import ModelArchitecture, NormNames
from inflight.config.gguf_config import FACTORS, gguf_family
from inflight.config.gguf_file import GgufTensor
from inflight.config.gguf_parts import read_gguf
from inflight.errors import CheckpointError
from inflight.kernels.quantized_weight import QuantizedWeight, select_rows
from inflight.model_loader.gguf_blocks import unpack_blocks
from inflight.model_loader.gguf_memory import mean_bits, memory_notice
from inflight.model_loader.packing import shard_columns
from inflight.model_loader.weight_source import ReadPart, ShardSlices, StoredTensor, WeightSource

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_NAMES_IN_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
# Tensors of all experts of a layer, [experts, rows, columns] or biases, [experts, rows] -> the projections whose rows they
# have, one behind the other
_STACKED = {
    "ffn_gate_exps.weight": ("gate_proj",),
    "ffn_up_exps.weight": ("up_proj",),
    "ffn_gate_up_exps.weight": ("gate_proj", "up_proj"),
    "ffn_down_exps.weight": ("down_proj",),
    "ffn_gate_exps.bias": ("gate_proj",),
    "ffn_up_exps.bias": ("up_proj",),
    "ffn_down_exps.bias": ("down_proj",),
}
_EXPERT = re.compile(r"ffn_(gate|up|down)\.(0|[1-9][0-9]*)\.weight")  # in files of 2023
_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]*)\.([\w.]+)")
# [channels, 1, kernel size]; the file has no dimension of size 1
_CONVOLUTIONS = (".conv1d.weight", ".conv.conv.weight")
_ONE_ROW = ".shared_expert_gate.weight"  # [1, hidden size]; the same


class GgufSource(WeightSource):
    """The tensors of a GGUF file. They are read in the row order of Hugging Face.

    In families such as "llama" (`Family.gguf_interleaves_heads`),
    llama.cpp's converter changes the order of the rows of the query and key
    projections: within each head, rows i and i + head_dim / 2, which are rotated together, become neighbours. Reading restores
    the order.
    """

    def __init__(self, path: Path, architecture: ModelArchitecture) -> None:
        self._file = read_gguf(path)
        self._head_dim = architecture.head_dims[0]
        self._norm_offset = architecture.norm_offset
        family = gguf_family(self._file)
        self._interleaves_heads = family.gguf_interleaves_heads
        self._places: dict[str, tuple[str, int]] = {}  # name -> the name in the file, and the first row
        self.tensors = {}
        for stored_name, tensor in self._file.tensors.items():
            if stored_name in FACTORS:
                continue  # `gguf_config` has read these
            block = _BLOCK.fullmatch(stored_name)
            if block is not None and block[2] in _STACKED:
                self._add_experts(stored_name, tensor, f"model.layers.{block[1]}.mlp.experts", _STACKED[block[2]])
                continue
            name = model_name(stored_name, architecture.layers[0].norms, family.gguf_tensors)
            is_quantized = tensor.type.is_quantized
            shape = tensor.shape
            if name.endswith(_CONVOLUTIONS) and len(shape) == 2:
                shape = (shape[0], 1, shape[1])
            if name.endswith(_ONE_ROW) and len(shape) == 1:
                shape = (1, *shape)
            if is_quantized and len(shape) != 2:
                raise CheckpointError(
                    f"{path}: {stored_name} is {tensor.type.name} and has {len(shape)} dimensions; quantized tensors must be "
                    "matrices"
                )
            self._add(name, StoredTensor(tensor.path, shape, tensor.type.name, is_quantized), stored_name, 0)
        self.bits_in_memory = mean_bits(self._file.tensors)
        self.notice = memory_notice(self._file.tensors)

    def _add(self, name: str, stored: StoredTensor, stored_name: str, first_row: int) -> None:
        if name in self.tensors:
            raise CheckpointError(
                f"{self._file.path}: {name} is there twice, in {self._places[name][0]} and in {stored_name}"
            )
        self.tensors[name] = stored
        self._places[name] = stored_name, first_row

    def _add_experts(self, stored_name: str, tensor: GgufTensor, prefix: str, projections: tuple[str, ...]) -> None:
        kind = stored_name.rpartition(".")[2]
        dimensions = ("experts", "rows") if kind == "bias" else ("experts", "rows", "columns")
        is_quantized_bias = kind == "bias" and tensor.type.is_quantized
        if len(tensor.shape) != len(dimensions) or tensor.shape[1] % len(projections) or is_quantized_bias:
            raise CheckpointError(
                f"{tensor.path}: {stored_name} has shape {list(tensor.shape)}; it should be [{', '.join(dimensions)}], with "
                f"the rows of {' and '.join(projections)}, and floats if it is a bias"
            )
        num_experts, num_rows, *columns = tensor.shape
        size = num_rows // len(projections)
        for expert in range(num_experts):
            for index, projection in enumerate(projections):
                stored = StoredTensor(tensor.path, (size, *columns), tensor.type.name, tensor.type.is_quantized)
                first_row = expert if kind == "bias" else expert * num_rows + index * size  # a bias is one row
                self._add(f"{prefix}.{expert}.{projection}.{kind}", stored, stored_name, first_row)

    @contextmanager
    def open(self) -> Iterator[ReadPart]:
        yield self._read

    def _read(self, name: str, shard: ShardSlices) -> Tensor | QuantizedWeight:
        if len(self.tensors[name].shape) > 1:
            start, stop, _ = shard[0].indices(self.tensors[name].shape[0])
            if len(self.tensors[name].shape) == 3:
                weight = self._read_rows(name, start, stop)
                assert isinstance(weight, Tensor), "only matrices are quantized"
                return weight.unsqueeze(1)[:, *shard[1:]]
            return shard_columns(self._read_rows(name, start, stop), shard[1], name)
        stored = self._unpack(name, 0, 1)  # a vector is one row
        assert isinstance(stored, Tensor), "only matrices are quantized"
        vector = stored[0]
        if self._is_interleaved(name):
            vector = vector[_rows_as_stored(0, len(vector), self._head_dim)]
        if name.endswith(".A_log"):
            vector = (-vector).log()  # the converter has computed -exp(A_log)
        if name.endswith("norm.weight") and "linear_attn" not in name:
            vector = vector - self._norm_offset  # the converter has added it
        return vector[shard]

    def _read_rows(self, name: str, start: int, stop: int) -> Tensor | QuantizedWeight:
        if not self._is_interleaved(name):
            return self._unpack(name, start, stop - start)
        first = start // self._head_dim * self._head_dim  # read whole heads, because a row may be anywhere in its head
        last = -(-stop // self._head_dim) * self._head_dim
        return select_rows(
            self._unpack(name, first, last - first), _rows_as_stored(start - first, stop - first, self._head_dim)
        )

    def _is_interleaved(self, name: str) -> bool:
        return self._interleaves_heads and re.search(r"\.self_attn\.[qk]_proj\.", name) is not None

    def _unpack(self, name: str, row: int, num_rows: int) -> Tensor | QuantizedWeight:
        stored_name, first_row = self._places[name]
        kind = self._file.tensors[stored_name].type
        return unpack_blocks(kind, self._file.map_tensor(stored_name, first_row + row, num_rows))


def model_name(stored_name: str, norms: NormNames, own: Mapping[str, str]) -> str:
    """Returns a tensor's name in a model folder: "model.layers.3.mlp.up_proj.weight" for "blk.3.ffn_up.weight". `norms`: the
    names of the layer's norms in the folder. `own`: `Family.gguf_tensors`.

    A tensor that no supported model has keeps its name, and the loader refuses it.
    """
    in_layer = _BLOCK.fullmatch(stored_name)
    if in_layer is not None:
        names_of_norms = {
            "attn_norm": norms.before_attention,
            "post_attention_norm": norms.after_attention,
            "ffn_norm": norms.before_mlp,
            "post_ffw_norm": norms.after_mlp,
        }
        expert = _EXPERT.fullmatch(in_layer[2])
        if expert is not None:
            return f"model.layers.{in_layer[1]}.mlp.experts.{expert[2]}.{expert[1]}_proj.weight"
        stem, _, suffix = in_layer[2].rpartition(".")
        stem_name = own.get(stem) or _NAMES_IN_LAYER.get(stem) or names_of_norms.get(stem)
        name = own.get(in_layer[2]) or (stem_name and f"{stem_name}.{suffix}")
        if name is None:
            return stored_name
        return f"model.layers.{in_layer[1]}.{name}"
    stem, _, suffix = stored_name.rpartition(".")
    stem_name = own.get(stem) or _NAMES.get(stem)
    return f"{stem_name}.{suffix}" if stem_name else stored_name


def _rows_as_stored(start: int, stop: int, head_dim: int) -> Tensor:
    """Returns the positions in the file of the model's rows `[start, stop)`. The rows, and the positions in the file, are
    counted from the first row of one head."""
    row = torch.arange(start, stop, dtype=torch.int64, device="cpu")
    half = row % head_dim // (head_dim // 2)
    place = row % (head_dim // 2)
    return row - row % head_dim + 2 * place + half
