"""`TokenInputs`: the vectors that each layer of Gemma 4's small models gets for each token ("per-layer embeddings").

A vector is the sum of two parts: a row of a table, chosen by the token's id, and a projection of the token's embedding. Every
rank computes them all. `TokenInput` brings a layer's vectors into its hidden states.
"""

import torch
from torch import Tensor

from inflight.config.architecture import TokenInputsSpec
from inflight.layers.context import LayerContext
from inflight.layers.linear import ColumnParallelLinear
from inflight.layers.norm import RMSNorm
from inflight.layers.sharding import OutputShard
from inflight.layers.vocab import VocabParallelEmbedding
from inflight.layers.weights import Loadable, WeightSlots


def _whole(in_features: int, out_features: int, name: str, context: LayerContext) -> ColumnParallelLinear:
    """A projection that each rank computes as a whole."""
    part = OutputShard(total=out_features, start=0, size=out_features)
    return ColumnParallelLinear(in_features, {name: part}, bias=False, context=context)


class TokenInputs(Loadable):
    """The names of its tensors in the checkpoint replace the name of this layer."""

    def __init__(
        self, num_layers: int, hidden_size: int, eps: float, spec: TokenInputsSpec, context: LayerContext
    ) -> None:
        super().__init__()
        self.num_layers = num_layers
        self.size = spec.size
        self.padding_id = spec.padding_id
        self.scale = hidden_size**-0.5
        self.table_scale = float(torch.tensor(spec.size**0.5, dtype=context.dtype, device="cpu"))
        self.table = VocabParallelEmbedding(spec.vocab_size, num_layers * spec.size, context)
        self.projection = _whole(hidden_size, num_layers * spec.size, "per_layer_model_projection", context)
        self.norm = RMSNorm(spec.size, eps, context)

    def weight_slots(self, prefix: str) -> WeightSlots:
        block = prefix.rpartition(".")[0]
        yield from self.table.weight_slots(f"{block}.embed_tokens_per_layer")
        yield from self.projection.weight_slots(prefix)
        yield from self.norm.weight_slots(f"{block}.per_layer_projection_norm")

    def forward(self, input_ids: Tensor, embedded: Tensor, image_rows: Tensor | None) -> Tensor:
        """input_ids [num_tokens], embedded [num_tokens, hidden_size] -> [num_tokens, num_layers, size], a new tensor.
        `image_rows`: int64 [n], which of the tokens belong to images."""
        if image_rows is not None:
            input_ids = input_ids.index_fill(0, image_rows, self.padding_id)
        projected = self.projection(embedded).mul_(self.scale).view(-1, self.size)
        of_table = self.table(input_ids).mul_(self.table_scale)
        both: Tensor = self.norm(projected).add_(of_table.view(-1, self.size))
        return both.mul_(2**-0.5).view(-1, self.num_layers, self.size)


class TokenInput(Loadable):
    """A layer's part. The names of its tensors in the checkpoint replace the name of this layer."""

    def __init__(self, hidden_size: int, eps: float, spec: TokenInputsSpec, context: LayerContext) -> None:
        super().__init__()
        self.gate = _whole(hidden_size, spec.size, "per_layer_input_gate", context)
        self.projection = _whole(spec.size, hidden_size, "per_layer_projection", context)
        self.norm = RMSNorm(hidden_size, eps, context)
        self.activation = spec.activation
        self.ops = context.ops

    def weight_slots(self, prefix: str) -> WeightSlots:
        yield from self.gate.weight_slots(prefix)
        yield from self.projection.weight_slots(prefix)
        yield from self.norm.weight_slots(f"{prefix.rpartition('.')[0]}.post_per_layer_input_norm")

    def forward(self, hidden: Tensor, vectors: Tensor) -> Tensor:
        """hidden [num_tokens, hidden_size], vectors [num_tokens, size] -> what is added to the hidden states. Changes
        `vectors`."""
        self.ops.multiply_activation(vectors, self.gate(hidden), self.activation)
        normed: Tensor = self.norm(self.projection(vectors))
        return normed
