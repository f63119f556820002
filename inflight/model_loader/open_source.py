"""`open_source`: opens the weights of a model, whatever the format of its files."""

import torch

from inflight.config.architecture import TRANSFORMERS
from inflight.config.engine import ModelConfig
from inflight.config.weight_format import MAY_HAVE_FP8, MXFP4, becomes_floats
from inflight.model_loader.checkpoint import Checkpoint
from inflight.model_loader.float8_source import Float8Source
from inflight.model_loader.gguf_mmproj import MmprojSource, WithTower
from inflight.model_loader.gguf_source import GgufSource
from inflight.model_loader.mxfp4_source import Mxfp4Source
from inflight.model_loader.packed_checkpoint import PackedCheckpoint
from inflight.model_loader.stacked_experts import StackedExperts
from inflight.model_loader.weight_source import WeightSource


def open_source(model_config: ModelConfig) -> WeightSource:
    """
    Raises:
        CheckpointError: see `WeightSource`.
    """
    architecture = model_config.architecture
    if model_config.load_format == "gguf":
        text = StackedExperts(GgufSource(model_config.folder, architecture))
        return text if model_config.mmproj is None else WithTower(text, MmprojSource(model_config.mmproj))
    weight_format = architecture.weight_format
    keeps_names = architecture.implementation == TRANSFORMERS
    source: WeightSource = Checkpoint(model_config.folder, keeps_names=keeps_names, renames=architecture.renames)
    dtype = getattr(torch, model_config.dtype)
    if weight_format in MAY_HAVE_FP8:
        quantization = model_config.quantization.layers
        source = Float8Source(
            source,
            architecture.weight_blocks,
            dtype,
            quantization=quantization,
            has_other_formats=not becomes_floats(weight_format),
        )
    if weight_format == MXFP4:
        source = Mxfp4Source(source, dtype if keeps_names else None)
    elif not becomes_floats(weight_format):
        source = PackedCheckpoint(source, weight_format)
    return source if keeps_names else StackedExperts(source)
