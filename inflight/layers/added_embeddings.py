"""`make_embedding`: the embedding of a model. `PlacedEmbedding`: one with learned embeddings of a token's position and type.
`ProjectedEmbedding`: one of another size than the hidden size."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inflight.config.added_embeddings import AddedEmbeddingsSpec
from inflight.config.architecture import ModelArchitecture
from inflight.layers.context import LayerContext
from inflight.layers.layer_norm import LayerNorm
from inflight.layers.linear import ColumnParallelLinear
from inflight.layers.sharding import OutputShard
from inflight.layers.vocab import VocabParallelEmbedding
from inflight.layers.weights import WeightSlot, WeightSlots


class PlacedEmbedding(VocabParallelEmbedding):
    """Adds the embeddings of a token's position and type to that of the token. Every rank holds both tables. Their names in the
    checkpoint are the names of the attributes, in place of the name of this layer."""

    def __init__(self, vocab_size: int, hidden_size: int, spec: AddedEmbeddingsSpec, context: LayerContext) -> None:
        super().__init__(vocab_size, hidden_size, context)

        def table(size: int) -> nn.Parameter | None:
            empty = torch.empty(size, hidden_size, dtype=context.dtype, device=context.weight_device)
            return nn.Parameter(empty, False) if size else None

        self.first_position = spec.first_position
        self.position_embeddings = table(spec.num_positions)
        self.token_type_embeddings = table(spec.num_types)

    def weight_slots(self, prefix: str) -> WeightSlots:
        yield from super().weight_slots(prefix)
        block = prefix.rpartition(".")[0]
        for name in ("position_embeddings", "token_type_embeddings"):
            table = getattr(self, name)
            if table is not None:
                yield f"{block}.{name}.weight", WeightSlot(shape=tuple(table.shape), destination=table.data)

    def embed(self, input_ids: Tensor, positions: Tensor, token_types: Tensor | None) -> Tensor:
        embedded: Tensor = self(input_ids)
        if self.position_embeddings is not None:
            embedded.add_(F.embedding(positions + self.first_position, self.position_embeddings))
        types = self.token_type_embeddings
        if types is not None:
            embedded.add_(types[0] if token_types is None else F.embedding(token_types, types))
        return embedded


class ProjectedEmbedding(PlacedEmbedding):
    """The sum of the embeddings has `size` numbers. It is normed, and every rank projects all of it to the hidden size."""

    def __init__(
        self, architecture: ModelArchitecture, spec: AddedEmbeddingsSpec, size: int, context: LayerContext
    ) -> None:
        super().__init__(architecture.vocab_size, size, spec, context)
        self.norm = LayerNorm(size, architecture.rms_norm_eps, context, has_bias=True)
        whole = OutputShard(total=architecture.hidden_size, start=0, size=architecture.hidden_size)
        self.projection = ColumnParallelLinear(size, {"embedding_projection": whole}, bias=True, context=context)

    def weight_slots(self, prefix: str) -> WeightSlots:
        yield from super().weight_slots(prefix)
        block = prefix.rpartition(".")[0]
        yield from self.norm.weight_slots(f"{block}.embedding_norm")
        yield from self.projection.weight_slots(f"{block}.projection")

    def finish_loading(self) -> None:
        super().finish_loading()
        self.projection.finish_loading()

    def embed(self, input_ids: Tensor, positions: Tensor, token_types: Tensor | None) -> Tensor:
        normed = self.norm(super().embed(input_ids, positions, token_types))
        projected: Tensor = self.projection(normed)
        return projected


def make_embedding(architecture: ModelArchitecture, context: LayerContext) -> VocabParallelEmbedding:
    sizes = architecture.vocab_size, architecture.hidden_size
    added = architecture.added_embeddings
    if added is None:
        return VocabParallelEmbedding(*sizes, context)
    assert architecture.embedding_scale == 1.0, "no family scales such embeddings"
    if added.factor_size is not None:
        return ProjectedEmbedding(architecture, added, added.factor_size, context)
    return PlacedEmbedding(*sizes, added, context)
