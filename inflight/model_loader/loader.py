"""`load_model`: builds the model and fills it, a block at a time.

A block (in the code: `unit`) is the embedding, a decoder layer, the final norm or the head. The loader allocates memory for the
block, copies the block's tensors from the mapped file into the (fused, sharded) weights, and closes the file. Then the block
converts the weights to their final form and frees the memory that it no longer needs. So at most one block is in memory twice,
and of large weights only some rows at a time (`StreamedRows`).

A layer can accept a tensor as the file stores it (`WeightSlot.accept`). A quantized tensor that is not accepted is converted to
floats.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from inflight.attention.backend import AttentionBackend
from inflight.config.architecture import TRANSFORMERS, ModelArchitecture
from inflight.config.engine import ModelConfig
from inflight.config.pipeline_stage import PipelineStage
from inflight.config.safetensors_file import have_same_bytes, read_header
from inflight.config.stored_head import warn_of_another_head
from inflight.damaged_files import named_errors
from inflight.distributed.expert_parallel import ExpertParallelGroup
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.errors import CheckpointError, ConfigError, UnsupportedModelError
from inflight.kernels.quantized_weight import QuantizedWeight, select_rows
from inflight.layers.context import LayerContext, make_context
from inflight.layers.linear import Linear
from inflight.layers.weights import Loadable
from inflight.model_loader.loading_threads import LoadingThreads
from inflight.model_loader.open_source import open_source
from inflight.model_loader.streamed_rows import StreamedRows, fill_with_rows, is_streamed
from inflight.model_loader.weight_check import check_weights, list_names
from inflight.model_loader.weight_size import WeightSizes, weight_sizes
from inflight.model_loader.weight_source import WeightSource
from inflight.models.causal_lm import CausalLM
from inflight.models.make_decoder import make_decoder
from inflight.weight_cache.background import BackgroundWork
from inflight.weight_cache.cache import WeightCache

logger = logging.getLogger(__name__)

_Fill = Callable[[Loadable, str], None]  # of a unit that has memory, with its prefix
_STANDARD_DEVIATION = 0.02  # of dummy weights


def load_model(
    model_config: ModelConfig,
    *,
    device: torch.device,
    backend: AttentionBackend,
    tp: TensorParallelGroup,
    ep: ExpertParallelGroup | None = None,
    stage: PipelineStage | None = None,
    check_size: Callable[[WeightSizes], None] | None = None,
    later: BackgroundWork | None = None,
    served: CausalLM | None = None,
) -> CausalLM:
    """Returns a model that can run, with weights in `model_config.dtype`. If `stage` is given, the model has only this pipeline
    stage. `check_size` is called with the sizes of the weights, before memory is allocated for them. `later` keeps the packed
    weights for the next start, beside serving; without it, none are read or written. `served`: see `DraftingLayer`.

    Every stage checks the whole checkpoint against the whole model, but reads only its own weights.

    Raises:
        ConfigError: the quantization needs kernels that are not installed.
        CheckpointError: tensors are missing, extra, misshapen or in an unsupported form, or a file is missing or corrupt.
    """
    architecture = model_config.architecture
    whole = PipelineStage(0, architecture.num_layers, architecture.num_layers)
    stage = stage or whole
    context = make_context(
        dtype=getattr(torch, model_config.dtype),
        device=device,
        tp=tp,
        backend=backend,
        quantization=model_config.quantization,
        ep=ep,
    )
    source = None if model_config.load_format == "dummy" else open_source(model_config)
    # Each block gets memory only when it is filled. By then the previous block has converted its weights and freed the old
    # ones.
    empty = replace(context, allocates_later=True)
    not_kept: list[str] = []
    make: Callable[[LayerContext, PipelineStage], CausalLM] = (
        partial(
            _make_fallback,
            model_config,
            source,
            cache(partial(_differ, source, tp.rank == 0 and stage.is_last)),
            partial(_load_unit, _filler(model_config, source, []), device),
        )
        if architecture.implementation == TRANSFORMERS
        else partial(_make_decoder, architecture, served, source)
    )
    files = () if source is None else (stored.file for stored in source.tensors.values())
    weight_cache = WeightCache(model_config, files, context=context, tp=tp, stage=stage, later=later)
    with named_errors(UnsupportedModelError, model_config.folder, "a model of these sizes"):
        model = make(weight_cache.wrap(empty), stage)
        # tensors on the meta device have shapes but no memory
        on_meta = replace(empty, device=torch.device("meta"))
        all_stages = described = model if stage == whole and ep is None else make(on_meta, whole)
        if ep is not None:  # sizes are lower bounds: rank 0 has the fewest experts
            all_stages, described = (make(replace(on_meta, ep=ep.seen_by(0, size)), whole) for size in (ep.size, 1))
    if model_config.batch_invariant:
        _check_batch_invariance(context, architecture, model)
    if check_size is not None:
        check_size(weight_sizes(model, all_stages, model_config, source.bits_in_memory if source else None))
    if source is not None:
        if source.notice and tp.rank == 0 and stage.is_last:
            logger.info("%s: %s", model_config.folder, source.notice)
        unlisted = _check_source(source, described, model_config.folder)
        if unlisted and tp.rank == 0 and stage.is_last:
            logger.warning("the model does not need these tensors, which no index lists: %s", list_names(unlisted))
    fill = _filler(model_config, source, not_kept)
    model = _load_all(weight_cache, fill, device, model, lambda: make(weight_cache.wrap(empty), stage))
    if model.pooler is not None and source is not None:
        model.pooler.read_files(model_config.folder)
    model.finish_loading()
    notes = weight_cache.notes or _note_dequantized(
        model, not_kept, model_config.quantization.layers or model_config.dtype
    )
    for note in notes:
        logger.warning("%s", note)
    weight_cache.keep(notes)
    return model


def _check_source(source: WeightSource, model: CausalLM, folder: Path) -> list[str]:
    """As `check_weights`. An error begins with the model's folder or file."""
    try:
        return check_weights(source, model)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def _filler(model_config: ModelConfig, source: WeightSource | None, not_kept: list[str]) -> _Fill:
    if source is None:
        return partial(_fill_from_seed, seed=model_config.seed)
    quantization = model_config.quantization
    is_quantized = quantization.layers is not None or quantization.head is not None
    return partial(_fill_from_source, source=source, not_kept=not_kept, is_quantized=is_quantized)


def _load_all(
    weight_cache: WeightCache, fill: _Fill, device: torch.device, model: CausalLM, make_again: Callable[[], CausalLM]
) -> CausalLM:
    threads = LoadingThreads()
    with threads.watched():
        return weight_cache.load(model, partial(_allocate_and_fill, fill, device, threads), make_again)


def _allocate_and_fill(
    fill: _Fill, device: torch.device, threads: LoadingThreads | None, unit: Loadable, prefix: str
) -> None:
    if threads is not None:
        threads.look()
    unit.allocate(device)
    fill(unit, prefix)


def _load_unit(fill: _Fill, device: torch.device, unit: Loadable, prefix: str) -> None:
    _allocate_and_fill(fill, device, None, unit, prefix)
    unit.finish_loading()


def _make_decoder(
    architecture: ModelArchitecture,
    served: CausalLM | None,
    source: WeightSource | None,
    context: LayerContext,
    stage: PipelineStage,
) -> CausalLM:
    model = make_decoder(architecture, served, context, stage)
    if model.tower is not None:
        model.tower.read_names(_shapes(source))
    return model


def _shapes(source: WeightSource | None) -> dict[str, tuple[int, ...]] | None:
    return None if source is None else {name: tensor.shape for name, tensor in source.tensors.items()}


def _make_fallback(
    model_config: ModelConfig,
    source: WeightSource | None,
    differ: Callable[[str, str], bool],
    load: Callable[[Loadable, str], None],
    context: LayerContext,
    stage: PipelineStage,
) -> CausalLM:
    # transformers is optional
    from inflight.models.transformers_fallback.model import TransformersForCausalLM
    from inflight.models.transformers_fallback.weights import Checkpoint

    return TransformersForCausalLM(model_config, context, stage, Checkpoint(_shapes(source), differ, load))


def _differ(source: WeightSource | None, tells: bool, one: str, other: str) -> bool:
    """Whether two tensors differ that are the same according to config.json. `tells`: log that they do."""
    assert source is not None, "random weights are not compared"
    stored = [source.tensors[name] for name in (one, other)]
    differ = any(each.is_quantized for each in stored) or not have_same_bytes(
        read_header(stored[0].file)[one], read_header(stored[1].file)[other]
    )
    if differ and tells:
        warn_of_another_head(source.tensors[one].file)
    return differ


def _note_dequantized(model: CausalLM, not_kept: list[str], held_as: str) -> tuple[str, ...]:
    if not not_kept:
        return ()
    with_them = sum(module.num_dequantized for module in model.modules() if isinstance(module, Linear))
    fused = f"; {with_them} of the weights are held so only because one of these is in the same fused layer"
    return (
        f"{len(not_kept) + with_them} quantized weights are held as {held_as}, because no kernel supports their groups "
        "(act-order, or a size that is no multiple of 32, or of 16 with 8 bits): "
        f"{list_names(not_kept)}{fused if with_them else ''}",
    )


def _check_batch_invariance(context: LayerContext, architecture: ModelArchitecture, model: CausalLM) -> None:
    """Checks that a row's result cannot depend on the other rows of its batch.

    Raises:
        ConfigError: a result can depend on other rows; the message gives the first reason.
    """

    def refusal(reason: str) -> ConfigError:
        return ConfigError(f"batch_invariant=True cannot be kept here: {reason}; leave it out")

    mixers = {layer.mixer for layer in architecture.layers}
    if any(mixer.depends_on_chunks for mixer in mixers):
        raise refusal("the results of its recurrent layers depend on how the scheduler has cut a prompt into pieces")
    sizes = {architecture.hidden_size}
    sizes |= {module.in_features for module in model.modules() if isinstance(module, Linear)}
    sizes |= {size for mixer in mixers for size in mixer.head_products}
    if not all(method.is_batch_invariant(size) for method in (context.linear, context.head) for size in sizes):
        raise refusal(
            "its linear layers are not computed by the C++ kernels (which need input features in multiples of 4)"
        )
    if not context.backend.is_batch_invariant:
        raise refusal(
            "its attention is not computed by the C++ kernel (which needs multiples of 16 as head_dim and block_size)"
        )


def _fill_from_seed(unit: Loadable, prefix: str, *, seed: int) -> None:
    """Draws weights from a normal distribution with standard deviation 0.02, and sets the weights of norms to 1.

    A tensor depends only on the seed, the tensor's name and the kind of device. So the weights are the same for any number of
    ranks and any order of loading. A GPU draws its weights itself, which takes only a second for an 8B model. Its random
    numbers differ from those of a CPU.
    """
    for name, slot in unit.weight_slots(prefix):
        destination = slot.destination
        if slot.is_scale:
            destination.fill_(1)
            continue
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator(destination.device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        is_whole = tuple(destination.shape) == slot.shape
        whole = destination if is_whole else destination.new_empty(slot.shape)
        whole.normal_(0, _STANDARD_DEVIATION, generator=generator)
        if not is_whole:
            part = whole.narrow(slot.dim, slot.start, slot.size)
            destination.copy_(part if slot.rows is None or part.shape == destination.shape else part[slot.rows])


def _fill_from_source(
    unit: Loadable, prefix: str, *, source: WeightSource, not_kept: list[str], is_quantized: bool
) -> None:
    """Loads a unit's weights from `source`. Appends to `not_kept` the names of quantized weights that become floats because no
    kernel supports them.

    Args:
        is_quantized: whether weights in floats are quantized afterwards.

    Raises:
        CheckpointError: such a weight has an element that is NaN or infinite. An integer cannot be that: it would become some
            other number, and the answers would only be wrong. Or a weight that is stored quantized has such a scale.
    """
    check = partial(_check_part, source, is_quantized=is_quantized)
    with source.open() as read:
        for name, slot in unit.weight_slots(prefix):
            if slot.size == 0:
                continue  # all rows of this rank are padding of the vocabulary
            held = [slice(0, size) for size in slot.shape]
            if held:
                held[slot.dim] = slice(slot.start, slot.start + slot.size)
            stored = source.tensors[name]
            if is_streamed(slot, stored):
                rows = StreamedRows(source, name, held, slot.destination.dtype, check)
                if fill_with_rows(slot, rows):
                    if stored.is_quantized and slot.accept is not None and not rows.is_quantized:
                        not_kept.append(name)
                    continue
            part = check(name, read(name, tuple(held)))
            if stored.is_quantized and not isinstance(part, QuantizedWeight):
                not_kept.append(name)
            if slot.rows is not None:
                part = select_rows(part, slot.rows)
            if slot.accept is None or not slot.accept(part):
                floats = _floats(part)
                slot.destination.copy_(floats.float() + slot.offset if slot.offset else floats)


def _check_part(
    source: WeightSource, name: str, part: Tensor | QuantizedWeight, *, is_quantized: bool
) -> Tensor | QuantizedWeight:
    """A part of a weight whose scales are finite: a kernel that multiplies with integers may make any number of others.
    `is_quantized`: floats are finite, too, because they are quantized afterwards."""
    problem = ""
    if isinstance(part, QuantizedWeight):
        if not all(each is None or bool(each.isfinite().all()) for each in (part.scales, part.offsets)):
            problem = "scales that are NaN or infinite: the file is damaged, or the model was quantized wrongly"
    elif is_quantized and part.dim() > 1:
        low, high = part.aminmax()  # a NaN is both the smallest and the largest element
        if not (low.isfinite() and high.isfinite()):
            problem = (
                "elements that are NaN or infinite, which cannot be quantized: the file is damaged, or the model was saved "
                "after its training had failed"
            )
    if problem:
        raise CheckpointError(f"{source.tensors[name].place(name)} has {problem}; download it again")
    return part


def _floats(part: Tensor | QuantizedWeight) -> Tensor:
    return part.dequantize() if isinstance(part, QuantizedWeight) else part
