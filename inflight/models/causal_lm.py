"""`CausalLM`: what the model runner and the loader ask of every model."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from inflight.attention.backend import AttentionMetadata
from inflight.config.architecture import ModelArchitecture
from inflight.config.partition import PipelineStage
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.layers.attention import Attention
from inflight.layers.context import LayerContext
from inflight.layers.linear import Linear
from inflight.layers.linear_method import LinearChoice
from inflight.layers.logits import LogitsHead
from inflight.layers.weights import Loadable


class CausalLM(nn.Module, ABC):
    """A decoder. The constructor allocates and draws nothing; `model_loader` fills it unit by unit, then it can run."""

    @abstractmethod
    def __init__(
        self,
        architecture: ModelArchitecture,
        context: LayerContext,
        stage: PipelineStage,
    ) -> None:
        """Only what belongs to `stage` is there: its layers, on the first stage the embedding, on the last norm and head."""
        super().__init__()

    @abstractmethod
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attn_metadata: tuple[AttentionMetadata, ...],
        rows: Tensor | None = None,
        num_layers: int | None = None,
        *,
        intermediate: IntermediateTensors | None = None,
    ) -> Tensor | IntermediateTensors:
        """The tokens of one step, of all its sequences, without padding between them.

        input_ids and positions [num_tokens], int32 or int64; attn_metadata: one per KV group; rows [num_rows], int64: the
        tokens whose hidden states are wanted, None for all (the others leave the last layer once their keys are written);
        num_layers: stop after so many, which is enough to see how much memory a step takes; intermediate: what the stage before
        returned (its residual is changed), None on the first stage, which alone reads input_ids.
        Returns the hidden states after the final norm, [num_rows, hidden_size]; on all stages but the last, which do not look
        at rows, what the next one takes.
        """

    @abstractmethod
    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden [num_rows, hidden_size], the rows that are asked for -> float32 [num_rows, vocab_size], contiguous; in
        `out`, if it is given. Last stage only."""

    @abstractmethod
    def attention_layers(self) -> dict[str, Attention]:
        """Layer name -> layer, in layer order, of this stage."""

    @abstractmethod
    def load_units(self) -> list[tuple[str, Loadable]]:
        """(checkpoint prefix, block) in loading order. One block at a time is held in plain and in final form."""

    def tune(self, max_num_rows: int) -> list[LinearChoice]:
        """See `LinearMethod.tune`, which this asks of every method that a layer has."""
        methods = dict.fromkeys(module.method for module in self.modules() if isinstance(module, Linear | LogitsHead))
        return [choice for method in methods for choice in method.tune(max_num_rows)]

    def finish_loading(self) -> None:
        """Called once, after every unit is loaded and before the first `forward`."""
