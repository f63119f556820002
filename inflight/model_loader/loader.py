"""`load_model`: builds the model and fills it, a block at a time.

At most one block is held twice: its tensors are copied from the mapped file into the (fused, sharded) weights, the
mapping is closed, and the block brings its weights into their final form, which drops the plain ones.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from inflight.attention.backend import AttentionBackend
from inflight.config.engine import ModelConfig
from inflight.config.partition import PipelineStage
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.errors import CheckpointError
from inflight.layers.weights import Loadable, WeightSlot
from inflight.model_loader.checkpoint import Checkpoint, StoredTensor, open_file
from inflight.models.causal_lm import CausalLM
from inflight.models.registry import get_model_class

DUMMY_STANDARD_DEVIATION = 0.02
_FLOAT_DTYPES = ("BF16", "F16", "F32", "F64")
_MAX_NAMES_SHOWN = 8


def load_model(
    model_config: ModelConfig,
    *,
    device: torch.device,
    backend: AttentionBackend,
    tp: TensorParallelGroup,
    stage: PipelineStage | None = None,
) -> CausalLM:
    """A model that can run, its weights in `model_config.dtype`; of several pipeline stages, the one that is given.

    Every stage checks the whole checkpoint against the whole model, and reads its own weights only.

    Raises:
        UnsupportedModelError: no such family.
        CheckpointError: tensors are missing, extra, misshapen or not floats, or a file is missing or corrupt.
    """
    architecture = model_config.architecture
    whole = PipelineStage(0, architecture.num_layers, architecture.num_layers)
    stage = stage or whole
    make = partial(
        get_model_class(architecture.name),
        architecture,
        dtype=getattr(torch, model_config.dtype),
        backend=backend,
        tp=tp,
    )
    model = make(device=device, stage=stage)
    if model_config.load_format == "dummy":
        fill: Callable[[Loadable, str], None] = partial(_fill_from_seed, seed=model_config.seed)
    else:
        checkpoint = Checkpoint(model_config.folder)
        # tensors of the meta device have shapes and no memory
        described = model if stage == whole else make(device=torch.device("meta"), stage=whole)
        _check_against(checkpoint, described, architecture.tie_word_embeddings)
        fill = partial(_fill_from_checkpoint, checkpoint=checkpoint)
    for prefix, unit in model.load_units():
        fill(unit, prefix)
        unit.finish_loading()
    return model


def _fill_from_checkpoint(unit: Loadable, prefix: str, *, checkpoint: Checkpoint) -> None:
    slots = dict(unit.weight_slots(prefix))
    for file in sorted({checkpoint.tensors[name].file for name in slots}):
        with open_file(file) as opened:
            for name, slot in slots.items():
                if checkpoint.tensors[name].file == file:
                    rows = slice(slot.start, slot.start + slot.size)
                    held = (slice(None),) * slot.dim + (rows,)
                    slot.destination.copy_(opened.get_slice(name)[held])


def _check_against(checkpoint: Checkpoint, model: CausalLM, is_tied: bool) -> None:
    """Everything that headers can tell, before the first weight is read."""
    slots = {name: slot for prefix, unit in model.load_units() for name, slot in unit.weight_slots(prefix)}
    missing = [name for name in slots if name not in checkpoint.tensors]
    if missing:
        raise CheckpointError(f"the checkpoint lacks {_list(missing)}")
    extra = [name for name in checkpoint.tensors if name not in slots and not _is_harmless(name, is_tied)]
    if extra:
        raise CheckpointError(
            f"the checkpoint has weights that config.json does not account for: {_list(extra)} (in "
            f"{checkpoint.tensors[extra[0]].file}); leaving them out would change the result"
        )
    for name, slot in slots.items():
        _check_tensor(name, slot, checkpoint.tensors[name])


def _check_tensor(name: str, slot: WeightSlot, stored: StoredTensor) -> None:
    if stored.shape != slot.shape:
        raise CheckpointError(
            f"{name} in {stored.file} has shape {list(stored.shape)}, but config.json makes it {list(slot.shape)}"
        )
    if stored.dtype not in _FLOAT_DTYPES:
        raise CheckpointError(
            f"{name} in {stored.file} is stored as {stored.dtype}; only {', '.join(_FLOAT_DTYPES)} are read"
        )


def _is_harmless(name: str, is_tied: bool) -> bool:
    """Buffers of old releases that can be computed, and the copy of a tied embedding."""
    return re.search(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$", name) is not None or (
        is_tied and name == "lm_head.weight"
    )


def _list(names: list[str]) -> str:
    more = len(names) - _MAX_NAMES_SHOWN
    return ", ".join(names[:_MAX_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _fill_from_seed(unit: Loadable, prefix: str, *, seed: int) -> None:
    """Weights from N(0, 0.02), norms at 1. A tensor depends on the seed and its name only, not on order or sharding."""
    for name, slot in unit.weight_slots(prefix):
        if slot.is_scale:
            slot.destination.fill_(1)
        else:
            _draw(slot, f"{seed} {name}")


def _draw(slot: WeightSlot, source: str) -> None:
    digest = hashlib.sha256(source.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    destination: Tensor = slot.destination
    is_whole = tuple(destination.shape) == slot.shape and destination.device.type == "cpu"
    whole = destination if is_whole else torch.empty(slot.shape, dtype=destination.dtype)
    whole.normal_(0, DUMMY_STANDARD_DEVIATION, generator=generator)
    if not is_whole:
        destination.copy_(whole.narrow(slot.dim, slot.start, slot.size))
