"""`CapturingDecoder`: a decoder that copies the inputs of some layers out, for a drafter that reads them (EAGLE-3)."""

from collections.abc import Callable

import torch
from torch import Tensor

from inflight.attention.backend import LayerStep
from inflight.config.architecture import ModelArchitecture
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.layers.mixer import MixerPlace
from inflight.models.decoder import DecoderForCausalLM
from inflight.models.decoder_layer import DecoderLayer


class CapturedLayer(DecoderLayer):
    """A layer that first copies its input to its columns of `LayerStep.captured`, if the layer is one of
    `ModelArchitecture.captured`."""

    def __init__(self, place: MixerPlace) -> None:
        super().__init__(place)
        captured, size = place.architecture.captured, place.architecture.hidden_size
        self.columns: slice | None = None
        if place.layer in captured:
            first = captured.index(place.layer) * size
            self.columns = slice(first, first + size)

    def forward(
        self, delta: Tensor | None, residual: Tensor, step: LayerStep, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if step.captured is not None and self.columns is not None:
            kept = step.captured[:, self.columns]
            self.ops.copy_heads(residual.unsqueeze(1), kept.unsqueeze(1))
            if delta is not None:
                self.ops.add_and_scale(kept, delta, None)
        return super().forward(delta, residual, step, rows)


class CapturingDecoder(DecoderForCausalLM):
    layer_type = CapturedLayer


NewMemory = Callable[[Tensor, IntermediateTensors | None], Tensor | None]


def new_captured(architecture: ModelArchitecture, dtype: torch.dtype) -> NewMemory | None:
    """Returns what makes the memory for a step, of its token ids [num_tokens] and of what the stage before has sent. On later
    stages it is what the stage before has written to. None: nothing is captured."""
    if not architecture.captured:
        return None
    width = len(architecture.captured) * architecture.hidden_size

    def make(input_ids: Tensor, intermediate: IntermediateTensors | None) -> Tensor | None:
        if intermediate is not None:
            return intermediate.captured
        return torch.empty(len(input_ids), width, dtype=dtype, device=input_ids.device)

    return make
