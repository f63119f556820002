"""Whether a model's weights fit into the memory that is free, and what to do if they do not. Imports no torch.

`inflight serve --check` computes the size of the weights from the headers of their files. A rank asks again when it has made
its model (`MemoryBudget`), because then it knows the exact size. So the sizes here are lower bounds: what fits is never
refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from inflight.config.architecture import DTYPE_BYTES, INFLIGHT, ModelArchitecture
from inflight.config.engine import ModelConfig
from inflight.config.experts import MANY_TOKENS
from inflight.config.free_memory import available_bytes, is_limited
from inflight.config.gguf_file import EMBEDDING, GgufTensor, read_part
from inflight.config.gguf_parts import read_gguf
from inflight.config.machine import Machine
from inflight.config.safetensors_file import INDEX_FILE, StoredBytes, find_files, model_name, read_header
from inflight.config.weight_format import becomes_floats, is_fp8
from inflight.errors import CheckpointError, OutOfMemoryError

_INT4_BYTES = 0.5  # bytes of a weight, without scales
# Bytes of a weight of a linear layer, and of the head, in the formats that an error offers. int4 has a scale and an offset for
# each group of 64.
_OFFERED = {"int8": (1.0, 1.0), "int4": (0.5 + 4 / 64, 1.0)}
_FP8_SCALES = ("_scale", "_scale_inv")  # ends of the names of tensors that are only read, not kept
_KEEPS_FLOATS = re.compile(r"\.embed_tokens\.|\.mlp\.(gate|shared_expert_gate)\.")  # the embedding and routers
_OF_DECODER = ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head.")


class Beside(NamedTuple):
    """What an error about weights that do not fit says, beside their bytes.

    Attributes:
        expert_bytes: those of the weights that are experts.
        smaller: quantization -> the bytes of the weights with it.
        draft_bytes: those of the weights that are a draft model, an EAGLE head or an MTP layer.
    """

    expert_bytes: int = 0
    smaller: Mapping[str, int] = MappingProxyType({})
    draft_bytes: int = 0

    def times(self, factor: float) -> Beside:
        """Of so many replicas or ranks."""
        smaller = {name: int(size * factor) for name, size in self.smaller.items()}
        return Beside(int(self.expert_bytes * factor), smaller, int(self.draft_bytes * factor))

    def plus(self, other: Beside) -> Beside:
        """Of two models. Formats that only one of them can have are left out."""
        names = [name for name in self.smaller if name in other.smaller]
        smaller = {name: self.smaller[name] + other.smaller[name] for name in names}
        return Beside(self.expert_bytes + other.expert_bytes, smaller, self.draft_bytes + other.draft_bytes)


class Request(NamedTuple):
    """The longest request of a model, for which a KV cache needs room. The dtypes are names."""

    architecture: ModelArchitecture
    num_tokens: int
    dtype: str
    kv_cache_dtype: str

    @property
    def num_bytes(self) -> int:
        """What the KV caches of all ranks need for it, without what is left over in its last block. Layers with a
        window keep its tokens only; recurrent layers keep one state."""
        itemsize = DTYPE_BYTES.get(self.kv_cache_dtype, 1)
        scale_bytes = 4 if self.kv_cache_dtype == "int8" else 0
        recurrences = self.architecture.recurrences
        total = sum(each.state_bytes(DTYPE_BYTES.get(self.dtype, 2), 1) for each in recurrences)
        for attention in self.architecture.caching:
            num_kept = min(self.num_tokens, attention.window or self.num_tokens)
            total += num_kept * attention.token_bytes(itemsize, scale_bytes, 1)
        return total


class Room(NamedTuple):
    """What the weights of a model need, and how many ranks share them."""

    num_bytes: int  # the fewest bytes of one replica's weights
    beside: Beside = Beside()  # of one replica
    num_ranks: int = 1  # the ranks that share these weights
    num_replicas: int = 1  # the replicas on this machine
    kv_cache_bytes: int = 0  # the KV cache of a rank, if the user has set its size
    host_pool_bytes: int = 0  # the host memory of a replica for more KV blocks
    num_expert_copies: int | None = None  # how many replicas have all experts; None: all of them

    @property
    def int4_bytes(self) -> int | None:
        """The same as `num_bytes` with quantization="int4"; None if they are quantized already."""
        return self.beside.smaller.get("int4")


def check_room(room: Room, machine: Machine, request: Request | None = None) -> None:
    """Check that weights, KV caches and host pools of all ranks and replicas fit into the free memory of the host. On GPUs
    only the weights are checked, against all of a GPU's memory. `request`: what an error says of the KV cache.

    Raises:
        OutOfMemoryError: they do not fit.
    """
    if machine.device == "cpu":
        shared = 0 if room.num_expert_copies is None else room.num_replicas - room.num_expert_copies
        needed = room.num_replicas * room.num_bytes - shared * room.beside.expert_bytes
        free = available_bytes()
        if needed > free:
            beside = room.beside.times(room.num_replicas)
            if shared:  # how many of the bytes in other formats are of experts is not known
                beside = Beside((room.num_replicas - shared) * room.beside.expert_bytes)
            raise OutOfMemoryError(weights_do_not_fit(needed, free, beside, request, num_replicas=room.num_replicas))
        caches = room.num_replicas * (room.num_ranks * room.kv_cache_bytes + room.host_pool_bytes)
        if needed + caches > free:
            raise OutOfMemoryError(
                f"kv_cache_memory_bytes and kv_offloading_size ask for {gibibytes(caches)} of memory, all ranks and replicas "
                f"together, beside {gibibytes(needed)} of weights, but only {gibibytes(free)} is free; lower them to "
                f"{gibibytes(free - needed)} together at most, or free memory"
            )
        return
    largest = max((gpu.total_memory_bytes for gpu in machine.gpus), default=0)
    if largest and (part := room.num_bytes // room.num_ranks) > largest:
        raise OutOfMemoryError(
            f"the weights of a rank are {gibibytes(part)}, but its GPU has only {gibibytes(largest)}; set quantization, raise "
            "tensor_parallel_size or pipeline_parallel_size, or use a larger GPU"
        )


def weights_do_not_fit(
    num_bytes: int, free_bytes: int, beside: Beside, request: Request | None = None, *, num_replicas: int = 1
) -> str:
    """Returns the text of an error: weights of `num_bytes`, all replicas together, do not fit into the free host memory.
    `beside`: of all replicas, too."""
    replicas = f" of {num_replicas} replicas" if num_replicas > 1 else ""
    experts = beside.expert_bytes
    drafts = beside.draft_bytes
    parts = [f"{gibibytes(experts)} of experts"] if experts else []
    if drafts:
        parts.append(f"{gibibytes(drafts)} of what writes drafts")
    rest = num_bytes - experts - drafts
    of_parts = f" ({', '.join(parts)} and {gibibytes(rest)} of the rest)" if parts else ""
    needed = f"the weights{replicas} need {gibibytes(num_bytes)} of memory{of_parts}"
    kv_bytes = 0 if request is None else num_replicas * request.num_bytes
    if request is not None and kv_bytes:
        longest = f"one request of max_model_len={request.num_tokens}"
        needed += f", and the KV cache {gibibytes(kv_bytes)} for {longest}{' in each' if num_replicas > 1 else ''}"
    smaller = {name: size for name, size in beside.smaller.items() if size < 0.9 * num_bytes}
    ways = [_way(name, size, free_bytes, kv_bytes) for name, size in smaller.items()]
    if drafts:
        ways.append("leave speculative_config out")
    if num_replicas > 1:
        ways.append("lower data_parallel_size")
    ways.append("raise the memory limit of the container" if is_limited() else "end other programs")
    return f"{needed}, but only {gibibytes(free_bytes)} is free; {', '.join(ways)}, or use a smaller model"


def _way(quantization: str, num_bytes: int, free_bytes: int, kv_bytes: int) -> str:
    """What a smaller format changes."""
    if num_bytes > free_bytes:
        verdict = "does not fit either"
    elif num_bytes + kv_bytes > free_bytes:
        verdict = "fits with a smaller max_model_len"
    else:
        verdict = "fits"
    way = f"set quantization={quantization!r} (--quantization {quantization})"
    return f"{way}, which needs about {gibibytes(num_bytes)} and {verdict}"


def find_room(
    source: Path, architecture: ModelArchitecture, dtype: str, quantization: str | None, mmproj: Path | None = None
) -> Room | None:
    """Returns what the weights in a folder or in a GGUF file need; None if no file says it.

    Args:
        dtype: as the user gave it; "auto" is the dtype of the checkpoint.
        quantization: as the user gave it, or None.
        mmproj: the file with the vision tower, of a GGUF file.
    """
    if source.is_file():
        files = [read_gguf(source), *([] if mmproj is None else [read_part(mmproj)])]
        sizes = [(name, _gguf_bytes(name, each, quantization)) for file in files for name, each in file.tensors.items()]
        of_experts = sum(size for name, size in sizes if "_exps." in name)
        return Room(int(sum(size for _, size in sizes)), Beside(int(of_experts)))
    stored = DTYPE_BYTES.get(architecture.dtype, 2)
    element = stored if dtype == "auto" else DTYPE_BYTES.get(dtype, 2)
    tensors = _tensors_of_model(source, architecture)
    if not tensors:
        if (total := _total_of_index(source)) is None:
            return None
        # Of a hub id only the small files are here. The index has the sum of the stored bytes. In fp8 some weights have one
        # byte and others two, so the sum does not say how many there are; then the specification does.
        num_stored = total // stored
        if is_fp8(architecture.weight_format):
            num_stored = max(num_stored, min(total, num_weights(architecture)))
        tensors = {"model.layers.": StoredBytes(source, "", (num_stored, 1), 0, total)}
    experts = {name: tensor for name, tensor in tensors.items() if ".experts." in name}
    if not becomes_floats(architecture.weight_format):
        stored_bytes, of_experts = (
            int(0.9 * sum(tensor.stop - tensor.start for tensor in each.values())) for each in (tensors, experts)
        )
        return Room(stored_bytes, Beside(of_experts))
    layer = {None: element, "int4": _INT4_BYTES}.get(quantization, 1)
    formats = smaller_formats(quantization)
    smaller = {name: _num_bytes(tensors, element, *_OFFERED[name]) for name in formats}
    return Room(_num_bytes(tensors, element, layer), Beside(_num_bytes(experts, element, layer), smaller))


def with_draft(room: Room, draft: ModelConfig) -> Room:
    """`room` with the fewest bytes of what writes drafts: a model, or a layer of `draft`."""
    architecture = draft.architecture
    quantization = draft.quantization.layers
    if architecture.hidden_inputs is None:
        alone = find_room(draft.folder, architecture, draft.dtype, quantization)
        num_bytes = 0 if alone is None else alone.num_bytes
    else:
        features = sum(layer.mixer.num_features for layer in architecture.layers)
        element = DTYPE_BYTES.get(draft.dtype, 2) if quantization is None else _INT4_BYTES
        num_bytes = int(features * architecture.hidden_size * element)
    smaller = {name: size + num_bytes for name, size in room.beside.smaller.items()}
    beside = room.beside._replace(smaller=smaller, draft_bytes=num_bytes)
    return room._replace(num_bytes=room.num_bytes + num_bytes, beside=beside)


def _gguf_bytes(name: str, tensor: GgufTensor, quantization: str | None) -> float:
    """Floats may be served as two bytes, and with an option as half of one. The embedding is held as floats."""
    bits = tensor.type.bits_with_scales
    if name == EMBEDDING:
        bits = 16
    elif not tensor.type.is_quantized:
        bits = 16 if quantization is None else 4
    return prod(tensor.shape) * bits / 8


def smaller_formats(quantization: str | None) -> tuple[str, ...]:
    """The quantizations with which weights in floats need less memory than with this one."""
    return {None: ("int8", "int4"), "int4": ()}.get(quantization, ("int4",))


def _num_bytes(tensors: dict[str, StoredBytes], element: int, layer: float, head: float | None = None) -> int:
    """`element`: bytes of a weight of the embedding, the norms and the routers. `layer`: bytes of a weight of a linear
    layer. `head`: those of the head, if they are others."""
    total = 0.0
    for name, tensor in tensors.items():
        is_linear = len(tensor.shape) > 1 and not _KEEPS_FLOATS.search(name)
        of_linear = layer if head is None or not name.startswith("lm_head.") else head
        total += prod(tensor.shape) * (of_linear if is_linear else element)
    return int(total)


def _tensors_of_model(folder: Path, architecture: ModelArchitecture) -> dict[str, StoredBytes]:
    """The tensors that the engine loads, by their names; those of a part for sounds, for example, are left out. Empty if a file
    with weights is missing or damaged: another check reports this."""
    with suppress(CheckpointError):
        named = [
            (model_name(name, architecture.renames), tensor)
            for file in find_files(folder)[0]
            for name, tensor in read_header(file).items()
        ]
        is_tied = architecture.tie_word_embeddings
        of_tower = () if architecture.vision is None else architecture.vision.prefixes
        return {
            name: tensor
            for name, tensor in named
            if name.startswith((*_OF_DECODER, *of_tower))
            and not (is_tied and name.startswith("lm_head."))
            and not name.startswith(architecture.unread)
            and not (becomes_floats(architecture.weight_format) and name.endswith(_FP8_SCALES))
        }
    return {}


def num_weights(architecture: ModelArchitecture) -> int:
    """The fewest weights of a model on Inflight's own code: norms and some small projections are left out. 0 for other models,
    whose layers are not known."""
    if architecture.implementation != INFLIGHT:
        return 0
    features = sum(layer.mixer.num_features + layer.mlp.num_features_read(MANY_TOKENS) for layer in architecture.layers)
    tables = architecture.vocab_size * (1 if architecture.tie_word_embeddings else 2)
    of_tower = 0 if architecture.vision is None else architecture.vision.num_weights
    return int((features + tables) * architecture.hidden_size) + of_tower


def _total_of_index(folder: Path) -> int | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))["metadata"]["total_size"])
    return None


def gibibytes(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
