"""`GgufSource`: reads the tensors of a GGUF file under the names and in the row order of a Hugging Face folder."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from inflight.config.architecture import ModelArchitecture, NormNames
from inflight.config.families import FAMILIES
from inflight.config.gguf_config import FACTORS
from inflight.config.gguf_file import read_gguf
from inflight.errors import CheckpointError
from inflight.kernels.quantized_weight import QuantizedWeight, select_rows
from inflight.model_loader.gguf_blocks import unpack_blocks
from inflight.model_loader.packing import hold_columns
from inflight.model_loader.weight_source import Held, ReadPart, StoredTensor, WeightSource

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
}
_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]*)\.([\w.]+)")
# [channels, 1, kernel size]; the file has no dimension of size 1
_CONVOLUTIONS = (".conv1d.weight", ".conv.conv.weight")
_FLOATS = ("F32", "F16", "BF16")


class GgufSource(WeightSource):
    """The tensors of a GGUF file. They are read in the row order of Hugging Face.

    In families such as "llama" (`Family.gguf_interleaves_heads`),
    llama.cpp's converter changes the order of the rows of the query and key
    projections: within each head, rows i and i + head_dim / 2, which are rotated together, become neighbours. Reading restores
    the order.
    """

    def __init__(self, path: Path, architecture: ModelArchitecture) -> None:
        self._file = read_gguf(path)
        self._head_dim, self._norm_offset = architecture.head_dims[0], architecture.norm_offset
        stored_as = self._file.metadata.get("general.architecture")
        family = next(each for each in FAMILIES if each.gguf_name == stored_as)
        self._interleaves_heads = family.gguf_interleaves_heads
        self._stored_names: dict[str, str] = {}
        self.tensors = {}
        for stored_name, tensor in self._file.tensors.items():
            if stored_name in FACTORS:
                continue  # `gguf_config` has read these
            name = model_name(stored_name, architecture.layers[0].norms, family.gguf_tensors)
            is_quantized = tensor.type.name not in _FLOATS
            is_convolution = name.endswith(_CONVOLUTIONS) and len(tensor.shape) == 2
            shape = (tensor.shape[0], 1, tensor.shape[1]) if is_convolution else tensor.shape
            if is_quantized and len(shape) != 2:
                raise CheckpointError(
                    f"{path}: {stored_name} is {tensor.type.name} and has {len(shape)} dimensions; quantized tensors must be "
                    "matrices"
                )
            self._stored_names[name] = stored_name
            self.tensors[name] = StoredTensor(path, shape, tensor.type.name, is_quantized)

    @contextmanager
    def open(self) -> Iterator[ReadPart]:
        yield self._read

    def _read(self, name: str, held: Held) -> Tensor | QuantizedWeight:
        if len(self.tensors[name].shape) > 1:
            start, stop, _ = held[0].indices(self.tensors[name].shape[0])
            if len(self.tensors[name].shape) == 3:
                weight = self._read_rows(name, start, stop)
                assert isinstance(weight, Tensor), "only matrices are quantized"
                return weight.unsqueeze(1)[:, *held[1:]]
            return hold_columns(self._read_rows(name, start, stop), held[1], name)
        stored = self._unpack(name, 0, 1)  # a vector is one row
        assert isinstance(stored, Tensor), "only matrices are quantized"
        vector = stored[0]
        if self._is_interleaved(name):
            vector = vector[_rows_as_stored(0, len(vector), self._head_dim)]
        if name.endswith(".A_log"):
            vector = (-vector).log()  # the converter has computed -exp(A_log)
        if name.endswith("norm.weight") and "linear_attn" not in name:
            vector = vector - self._norm_offset  # the converter has added it
        return vector[held]

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
        stored = self._file.map_tensor(self._stored_names[name], row, num_rows)
        return unpack_blocks(self.tensors[name].dtype, torch.from_numpy(stored))


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
        stem, _, suffix = in_layer[2].rpartition(".")
        stem_name = own.get(stem) or _NAMES_IN_LAYER.get(stem) or names_of_norms.get(stem)
        name = own.get(in_layer[2]) or (stem_name and f"{stem_name}.{suffix}")
        return stored_name if name is None else f"model.layers.{in_layer[1]}.{name}"
    stem, _, suffix = stored_name.rpartition(".")
    stem_name = own.get(stem) or _NAMES.get(stem)
    return f"{stem_name}.{suffix}" if stem_name else stored_name


def _rows_as_stored(start: int, stop: int, head_dim: int) -> Tensor:
    """Returns the positions in the file of the model's rows `[start, stop)`. The rows, and the positions in the file, are
    counted from the first row of one head."""
    row = torch.arange(start, stop, dtype=torch.int64, device="cpu")
    half, place = row % head_dim // (head_dim // 2), row % (head_dim // 2)
    return row - row % head_dim + 2 * place + half
