"""`CausalLM`: the interface of every model, for the model runner and the loader."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from inflight.attention.backend import AttentionBackend
from inflight.attention.metadata import AttentionMetadata
from inflight.config.architecture import ModelArchitecture
from inflight.config.pipeline_stage import PipelineStage
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.layers.attention import Attention
from inflight.layers.context import LayerContext
from inflight.layers.linear import Linear
from inflight.layers.linear_method import LinearChoice
from inflight.layers.recurrent_state import RecurrentState
from inflight.layers.vocab import LogitsHead
from inflight.layers.weights import Loadable


class ModelStep(NamedTuple):
    """What a stage of the model computes in a step.

    Attributes:
        input_ids, positions: [num_tokens], int32 or int64. Only the first stage reads input_ids.
        attn_metadata: one for each KV group (layers that share a block table).
        rows: int64 [num_rows], indices of the tokens whose hidden states are returned; None for all tokens. Only the last stage
            reads `rows`.
        layers: the layers of this stage to compute, in rising order, counted from the stage's first; None for all. One layer of
            each kind is enough to measure the memory of a step.
        intermediate: the result of the previous stage; None on the first stage. Its tensor `residual` is changed in place.
    """

    input_ids: Tensor
    positions: Tensor
    attn_metadata: tuple[AttentionMetadata, ...]
    rows: Tensor | None = None
    layers: Sequence[int] | None = None
    intermediate: IntermediateTensors | None = None


class CausalLM(nn.Module, ABC):
    """A decoder. Its constructor creates layers whose weights have no values; `model_loader` fills them block by block."""

    backend: AttentionBackend | None = None  # the backend that the layers need, if it is not that of their context

    @abstractmethod
    def __init__(self, architecture: ModelArchitecture, context: LayerContext, stage: PipelineStage) -> None:
        """Creates the modules of `stage`: its layers; on the first stage the embedding; on the last stage the norm and the
        head."""
        super().__init__()

    @abstractmethod
    def forward(self, step: ModelStep) -> Tensor | IntermediateTensors:
        """Computes the tokens of all sequences in one step, without padding between sequences.

        On the last stage returns the hidden states after the final norm, [num_rows, hidden_size]. On any other stage returns
        the input of the next stage.
        """

    @abstractmethod
    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden [num_rows, hidden_size] -> float32 [num_rows, vocab_size], contiguous. If `out` is given, the result is
        written to `out`. Only for the last stage."""

    @abstractmethod
    def load_units(self) -> list[tuple[str, Loadable]]:
        """Returns (checkpoint prefix, block) pairs in loading order. The loader fills one block after another with
        weights, and converts it to the layout that the kernels need. So at most one block is in memory twice at a time."""

    def leaves_unread(self, name: str) -> bool:
        """Whether the checkpoint may have a tensor of this name that the model does not use."""
        return False

    def cache_users(self) -> Sequence[Attention | RecurrentState]:
        """Returns the part of each layer of this stage that uses a cache, in the order of the layers."""
        return [module for module in self.modules() if isinstance(module, Attention | RecurrentState)]

    def cached_layers(self) -> Mapping[str, Attention | RecurrentState]:
        """Returns layer name -> cache user, for the layers that have a cache of their own."""
        users = self.cache_users()
        return {user.layer_name: user for user in users if not isinstance(user, Attention) or user.owns_cache}

    def tune(self, max_num_rows: int) -> list[LinearChoice]:
        """Calls `LinearMethod.tune` of every method that the layers use."""
        methods = dict.fromkeys(module.method for module in self.modules() if isinstance(module, Linear | LogitsHead))
        return [choice for method in methods for choice in method.tune(max_num_rows)]

    def finish_loading(self) -> None:
        """Called once, after every block is loaded and before the first `forward`."""
