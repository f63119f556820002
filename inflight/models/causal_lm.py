"""`CausalLM`: the interface of every model, for the model runner and the loader."""

from __future__ import annotations

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
from inflight.layers.pooler import Pooler
from inflight.layers.recurrent_state import RecurrentState
from inflight.layers.vocab import LogitsHead
from inflight.layers.weights import Loadable
from inflight.models.vision.tower import VisionTower


class ImageEmbeddings(NamedTuple):
    """What replaces the embeddings of some tokens of a step.

    Attributes:
        rows: int64 [n], the indices of these tokens.
        vectors: [n, hidden_size * (1 + k)] in the model's dtype: their embeddings, and then what is added to their hidden
            states behind each of the first k layers.
    """

    rows: Tensor
    vectors: Tensor

    def replace_in(self, embedded: Tensor) -> ImageEmbeddings | None:
        """Changes `embedded`, [num_tokens, hidden_size]. Returns None if nothing is added behind layers."""
        embedded[self.rows] = self.vectors[:, : embedded.shape[1]]
        return None if self.vectors.shape[1] == embedded.shape[1] else self

    def reaches(self, layer: int, hidden_size: int) -> bool:
        """Whether something is added behind this layer of the first stage."""
        return self.vectors.shape[1] > (layer + 1) * hidden_size

    def add_behind(self, layer: int, hidden: Tensor) -> None:
        """Changes `hidden`, [num_tokens, hidden_size], behind a layer of the first stage, counted from 0."""
        size = hidden.shape[1]
        added = self.vectors[:, (layer + 1) * size : (layer + 2) * size]
        if added.shape[1]:
            hidden.index_add_(0, self.rows, added)


class ModelStep(NamedTuple):
    """What a stage of the model computes in a step.

    Attributes:
        input_ids, positions: [num_tokens], int32 or int64. Only the first stage reads input_ids. Positions may be
            [3, num_tokens] in a model whose positions have three rows for images.
        attn_metadata: one for each KV group (layers that share a block table).
        rows: int64 [num_rows], indices of the tokens whose hidden states are returned; None for all tokens. Only the last stage
            reads `rows`.
        layers: the layers of this stage to compute, in rising order, counted from the stage's first; None for all. One layer of
            each kind is enough to measure the memory of a step.
        intermediate: the result of the previous stage; None on the first stage. Its tensor `residual` is changed in place.
        token_types: [num_tokens], int32 or int64, the types of the tokens, in models that have them; None: all are 0. Only the
            first stage reads them.
        images: what replaces the embeddings of the tokens of images; None if there are none. Only the first stage reads it.
        hidden: [num_tokens, hidden_size], hidden states of the served model. Only a `DraftingLayer` reads them; None: 0.
        captured: [num_tokens, number of captured layers * hidden_size], to which a `CapturingDecoder` writes, if given.
    """

    input_ids: Tensor
    positions: Tensor
    attn_metadata: tuple[AttentionMetadata, ...]
    rows: Tensor | None = None
    layers: Sequence[int] | None = None
    intermediate: IntermediateTensors | None = None
    token_types: Tensor | None = None
    images: ImageEmbeddings | None = None
    hidden: Tensor | None = None
    captured: Tensor | None = None


class CausalLM(nn.Module, ABC):
    """A decoder. Its constructor creates layers whose weights have no values; `model_loader` fills them block by block."""

    mapped_bytes = 0  # of weights that are pages of a file of packed weights
    packed_key = ""  # of this file, if what was measured with it is valid for the next engine
    backend: AttentionBackend | None = None  # the backend that the layers need, if it is not that of their context
    # Values of these two would hide the modules.
    pooler: Pooler | None  # on the last stage of a pooling model, which has no head
    tower: VisionTower | None  # on the first stage of a model that reads images

    @abstractmethod
    def __init__(self, architecture: ModelArchitecture, context: LayerContext, stage: PipelineStage) -> None:
        """Creates the modules of `stage`: its layers; on the first stage the embedding; on the last stage the norm and the
        head."""
        super().__init__()
        self.pooler = None
        self.tower = None

    @abstractmethod
    def forward(self, step: ModelStep) -> Tensor | IntermediateTensors:
        """Computes the tokens of all sequences in one step, without padding between sequences.

        On the last stage returns the hidden states after the final norm, [num_rows, hidden_size]. On any other stage returns
        the input of the next stage.
        """

    @abstractmethod
    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden [num_rows, hidden_size] -> float32 [num_rows, vocab_size], contiguous. If `out` is given, the result is
        written to `out`. Only for the last stage. The logits of a pooling model are all 0: only a health check draws."""

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
