"""`GgufSource`: reads the tensors of a GGUF file under the names and in the row order of a Hugging Face folder."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from inflight.config.architecture import ModelArchitecture, NormNames
from inflight.config.experts import MoeSpec
from inflight.config.gguf_config import FACTORS, gguf_family
from inflight.config.gguf_parts import read_gguf
from inflight.config.mixers import GatedDeltaSpec, MixerSpec
from inflight.errors import CheckpointError
from inflight.kernels.quantized_weight import QuantizedWeight, select_rows
from inflight.model_loader.gguf_blocks import unpack_blocks
from inflight.model_loader.gguf_memory import mean_bits, memory_notice
from inflight.model_loader.gguf_order import (
    BETAS_AND_STEPS,
    FileOrder,
    file_order,
    rows_of_betas_and_steps,
    select_columns,
)
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
    # of the layer behind the last one, which predicts drafts
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.eh_proj": "eh_proj",
    "nextn.shared_head_norm": "shared_head.norm",
}
# Tensors of all experts of a layer, which `StackedExperts` divides
_STACKED = {
    "ffn_gate_exps.weight": "mlp.experts.gate_proj",
    "ffn_up_exps.weight": "mlp.experts.up_proj",
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_gate_exps.bias": "mlp.experts.gate_proj_bias",
    "ffn_up_exps.bias": "mlp.experts.up_proj_bias",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
_EXPERT = re.compile(r"ffn_(gate|up|down)\.(0|[1-9][0-9]*)\.weight")  # in files of 2023
_EXPERT_OF_MODEL = re.compile(r"mlp\.experts\.[0-9]+\.(gate|up|down)_proj\.(weight|bias)")
_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]*)\.([\w.]+)")
_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.")
# [channels, 1, kernel size]; the file has no dimension of size 1
_CONVOLUTIONS = (".conv1d.weight", ".conv.conv.weight")
_ONE_ROW = ".shared_expert_gate.weight"  # [1, hidden size]; the same
_CHOICE_BIAS = ".e_score_correction_bias"  # [1, experts] in some families
# The halves of the matrix that makes keys and values of a latent vector: [heads, latent, key], [heads, value, latent]
_KEYS, _VALUES, _KEYS_AND_VALUES = ".k_b_proj.weight", ".v_b_proj.weight", ".kv_b_proj.weight"


@dataclass(frozen=True)
class _Place:
    """Where the rows of a weight are: in the tensor `name` of the file, in this order. The rows of a tensor are those of all
    dimensions but the last."""

    name: str
    order: FileOrder


class GgufSource(WeightSource):
    """The tensors of a GGUF file. They are read in the order of Hugging Face (gguf_order.py). The experts of a layer are in one
    tensor for each projection, of which a part of one expert is read at once (`StackedExperts`)."""

    def __init__(self, path: Path, architecture: ModelArchitecture) -> None:
        self._file = read_gguf(path)
        self._norm_offset = architecture.norm_offset
        family = gguf_family(self._file)
        self._places: dict[str, _Place] = {}
        self._halves: dict[str, tuple[str, str]] = {}  # the weight of keys and values -> its two tensors in the file
        self.tensors = {}
        routers = [layer.mlp.router for layer in architecture.layers if isinstance(layer.mlp, MoeSpec)]
        one_row = (_ONE_ROW, *(_CHOICE_BIAS for router in routers[:1] if router.choice_bias_is_row))
        for stored_name, tensor in self._file.tensors.items():
            if stored_name in FACTORS:
                continue  # `gguf_config` has read these
            name = model_name(stored_name, architecture.layers[0].norms, family.gguf_tensors)
            shape = tensor.shape
            if name.endswith(_CONVOLUTIONS) and len(shape) == 2:
                shape = (shape[0], 1, shape[1])
            if name.endswith(one_row) and len(shape) == 1:
                shape = (1, *shape)
            is_stacked = ".mlp.experts." in name or name.endswith((_KEYS, _VALUES))
            is_quantized = tensor.type.is_quantized
            if is_quantized and len(shape) != 2 and not is_stacked:
                raise CheckpointError(
                    f"{path}: {stored_name} is {tensor.type.name} and has {len(shape)} dimensions; quantized tensors must be "
                    "matrices"
                )
            mixer = _mixer_of(name, architecture)
            stored = StoredTensor(tensor.path, stored_name, shape, tensor.type.name, is_quantized)
            if name.endswith(BETAS_AND_STEPS) and isinstance(mixer, GatedDeltaSpec) and not mixer.is_grouped:
                self._add_betas_and_steps(name, stored, stored_name, mixer)
                continue
            order = file_order(name, shape[0], architecture.head_dims[0], mixer, family)
            self._add(name, stored, _Place(stored_name, order))
        self._join_keys_and_values()
        self.name_in_file = partial(stored_name_of, norms=architecture.layers[0].norms, own=family.gguf_tensors)
        self.bits_in_memory = mean_bits(self._file.tensors)
        self.notice = memory_notice(self._file.tensors)

    def _add(self, name: str, stored: StoredTensor, place: _Place) -> None:
        if name in self.tensors:
            raise CheckpointError(
                f"{self._file.path}: {name} of the model is there twice, in {self._places[name].name} and in {place.name}"
            )
        self.tensors[name] = stored
        self._places[name] = place

    def _add_betas_and_steps(self, name: str, stored: StoredTensor, stored_name: str, mixer: GatedDeltaSpec) -> None:
        if len(stored.shape) != 2 or stored.shape[0] != 2 * mixer.num_value_heads:
            raise CheckpointError(
                f"{stored.file}: {stored_name} has shape {list(stored.shape)}; it should have two rows for each of "
                f"{mixer.num_value_heads} value heads"
            )
        prefix = name.removesuffix(BETAS_AND_STEPS)
        for part, rows in rows_of_betas_and_steps(mixer).items():
            shape = len(rows), stored.shape[1]
            self._add(prefix + part, replace(stored, shape=shape), _Place(stored_name, FileOrder(rows)))

    def _join_keys_and_values(self) -> None:
        halves = [name.removesuffix(end) for end in (_KEYS, _VALUES) for name in self.tensors if name.endswith(end)]
        for prefix in dict.fromkeys(halves):
            name = prefix + _KEYS
            other = prefix + _VALUES
            whole = prefix + _KEYS_AND_VALUES
            found = [self._places[each].name for each in (name, other) if each in self.tensors]
            if len(found) == 1:
                raise CheckpointError(
                    f"{self._file.path} has {found[0]}, but attn_k_b and attn_v_b of a layer must both be there; "
                    "download it again"
                )
            keys = self.tensors.pop(name)
            values = self.tensors.pop(other)
            is_matrices = len(keys.shape) == len(values.shape) == 3
            if not is_matrices or (keys.shape[0], keys.shape[1]) != (values.shape[0], values.shape[2]):
                raise CheckpointError(
                    f"{keys.file}: {self._places[name].name} has shape {list(keys.shape)}, {self._places[other].name} has "
                    f"{list(values.shape)}; they should be [heads, latent, key] and [heads, value, latent]"
                )
            num_heads, rank, size = keys.shape
            shape = num_heads * (size + values.shape[1]), rank
            self._add(whole, StoredTensor(keys.file, keys.stored_name, shape, "F32"), self._places[name])
            self._halves[whole] = (self._places[name].name, self._places[other].name)

    @contextmanager
    def open(self) -> Iterator[ReadPart]:
        yield self._read

    def _read(self, name: str, shard: ShardSlices) -> Tensor | QuantizedWeight:
        shape = self.tensors[name].shape
        if len(shape) == 1:
            return self._read_vector(name)[shard]
        start, stop, _ = shard[0].indices(shape[0])
        if name in self._halves:
            return self._read_keys_and_values(name, start, stop)[:, shard[1]]
        if len(shape) == 2:
            return shard_columns(self._read_rows(name, start, stop), shard[1], self.tensors[name].place(name))
        if name.endswith(_CONVOLUTIONS):
            weight = self._read_rows(name, start, stop)
            assert isinstance(weight, Tensor), "only matrices are quantized"
            return weight.unsqueeze(1)[:, *shard[1:]]
        assert stop == start + 1, "experts are read one by one"
        first, last, _ = shard[1].indices(shape[1])
        rows = self._read_rows(name, start * shape[1] + first, start * shape[1] + last)
        part = shard_columns(rows, shard[2], self.tensors[name].place(name))
        return part.unsqueeze(0) if isinstance(part, Tensor) else part

    def _read_vector(self, name: str) -> Tensor:
        place = self._places[name]
        stored = self._unpack(place.name, 0, 1)  # a vector is one row
        assert isinstance(stored, Tensor), "only matrices are quantized"
        vector = stored[0] if place.order.rows is None else stored[0][place.order.rows]
        if name.endswith(".A_log"):
            return (-vector).log()  # the converter has computed -exp(A_log)
        if name.endswith("norm.weight") and "linear_attn" not in name:
            return vector - self._norm_offset  # the converter has added it
        return vector

    def _read_rows(self, name: str, start: int, stop: int) -> Tensor | QuantizedWeight:
        """The rows [start, stop) of the weight, with all columns."""
        place = self._places[name]
        order = place.order
        if order.rows is None:
            weight = self._unpack(place.name, start, stop)
        else:
            rows = order.rows[start:stop]
            first = int(rows.min())
            weight = select_rows(self._unpack(place.name, first, int(rows.max()) + 1), rows - first)
        return weight if order.columns is None else select_columns(weight, order.columns, order.run)

    def _read_keys_and_values(self, name: str, start: int, stop: int) -> Tensor:
        """float32. The rows of each head are those of its keys, then those of its values."""
        of_keys, of_values = self._halves[name]
        _, rank, key_size = self._file.tensors[of_keys].shape
        value_size = self._file.tensors[of_values].shape[1]
        size = key_size + value_size
        first = start // size
        last = -(-stop // size)
        keys = _floats(self._unpack(of_keys, first * rank, last * rank)).view(-1, rank, key_size).mT
        values = _floats(self._unpack(of_values, first * value_size, last * value_size)).view(-1, value_size, rank)
        return torch.cat((keys, values), dim=1).flatten(0, 1)[start - first * size : stop - first * size]

    def _unpack(self, stored_name: str, start: int, stop: int) -> Tensor | QuantizedWeight:
        return unpack_blocks(
            self._file.tensors[stored_name].type, self._file.map_tensor(stored_name, start, stop - start)
        )


def _mixer_of(name: str, architecture: ModelArchitecture) -> MixerSpec | None:
    found = _IN_LAYER.match(name)
    index = int(found[1]) if found else architecture.num_layers
    if architecture.hidden_inputs is not None and found:
        index = 0  # its only layer has the number of a layer behind the last one
    return architecture.layers[index].mixer if index < architecture.num_layers else None


def _floats(weight: Tensor | QuantizedWeight) -> Tensor:
    return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight.float()


def model_name(stored_name: str, norms: NormNames, own: Mapping[str, str]) -> str:
    """Returns a tensor's name in a model folder: "model.layers.3.mlp.up_proj.weight" for "blk.3.ffn_up.weight". `norms`: the
    names of the layer's norms in the folder. `own`: `Family.gguf_tensors`.

    A tensor that no supported model has keeps its name, and the loader refuses it.
    """
    in_layer = _BLOCK.fullmatch(stored_name)
    if in_layer is not None:
        expert = _EXPERT.fullmatch(in_layer[2])
        if expert is not None:
            return f"model.layers.{in_layer[1]}.mlp.experts.{expert[2]}.{expert[1]}_proj.weight"
        stem, _, suffix = in_layer[2].rpartition(".")
        stem_name = own.get(stem) or _NAMES_IN_LAYER.get(stem) or _names_of_norms(norms).get(stem)
        name = own.get(in_layer[2]) or _STACKED.get(in_layer[2]) or (stem_name and f"{stem_name}.{suffix}")
        if name is None:
            return stored_name
        return f"model.layers.{in_layer[1]}.{name}"
    stem, _, suffix = stored_name.rpartition(".")
    stem_name = own.get(stem) or _NAMES.get(stem)
    return f"{stem_name}.{suffix}" if stem_name else stored_name


def stored_name_of(name: str, norms: NormNames, own: Mapping[str, str]) -> str:
    """The other way round: what the file calls a tensor of the model. A name that no file has stays as it is."""
    in_layer = _IN_LAYER.match(name)
    prefix = f"blk.{in_layer[1]}." if in_layer else ""
    rest = name.removeprefix(in_layer[0]) if in_layer else name
    tables = (own, _STACKED, _NAMES_IN_LAYER, _names_of_norms(norms)) if in_layer else (own, _NAMES)
    names = {other: stored for table in reversed(tables) for stored, other in table.items() if other}
    stem, _, suffix = rest.rpartition(".")
    expert = _EXPERT_OF_MODEL.fullmatch(rest)
    if rest in names:
        return prefix + names[rest]
    if stem in names:
        return f"{prefix}{names[stem]}.{suffix}"
    return f"{prefix}ffn_{expert[1]}_exps.{expert[2]}" if expert else name


def _names_of_norms(norms: NormNames) -> dict[str, str | None]:
    return {
        "attn_norm": norms.before_attention,
        "post_attention_norm": norms.after_attention,
        "ffn_norm": norms.before_mlp,
        "post_ffw_norm": norms.after_mlp,
    }
