"""What the stand-ins for a model share: layers that give the KV cache its shape, no weights, and a worker that has one."""

from __future__ import annotations

from typing import ClassVar

import torch

from inflight.attention.backend import AttentionBackend, AttentionParams
from inflight.config.architecture import ModelArchitecture
from inflight.config.pipeline_stage import PipelineStage
from inflight.layers.attention import Attention
from inflight.layers.context import LayerContext, make_context
from inflight.layers.weights import Loadable
from inflight.models.causal_lm import CausalLM
from inflight.worker.worker import Worker


class StandInModel(CausalLM):
    """`forward` and `compute_logits` are the benchmark's. The attention layers never compute."""

    def __init__(self, architecture: ModelArchitecture, context: LayerContext, stage: PipelineStage) -> None:
        super().__init__(architecture, context, stage)
        self._layers = {
            f"layers.{index}": Attention(
                f"layers.{index}",
                num_heads=architecture.attentions[index].num_heads,
                num_kv_heads=architecture.attentions[index].num_kv_heads,
                head_dim=architecture.head_dims[0],
                params=AttentionParams(1.0),
                backend=context.backend,
            )
            for index in range(stage.start, stage.stop)
        }
        self._stage = stage
        self._set_up(architecture, context.dtype, context.device)

    def _set_up(self, architecture: ModelArchitecture, dtype: torch.dtype, device: torch.device) -> None:
        """What the benchmark's own methods need; the end of the constructor."""

    def cached_layers(self) -> dict[str, Attention]:
        return self._layers

    def load_units(self) -> list[tuple[str, Loadable]]:
        return []


class StandInWorker(Worker):
    """The real worker, with `model_class` in the place of a model that is loaded."""

    model_class: ClassVar[type[StandInModel]]

    def _load_stage(self, backend: AttentionBackend) -> CausalLM:
        config = self._config.model
        context = make_context(
            dtype=getattr(torch, config.dtype),
            device=self._device.torch_device,
            tp=self._tp,
            backend=backend,
            quantization=config.quantization,
        )
        return self.model_class(config.architecture, context, self._stage)
