"""`make_embedding`: the embedding of a model. `PlacedEmbedding`: one with learned embeddings of a token's position and type."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inflight.config.added_embeddings import AddedEmbeddingsSpec
from inflight.config.architecture import ModelArchitecture
from inflight.layers.context import LayerContext
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


def make_embedding(architecture: ModelArchitecture, context: LayerContext) -> VocabParallelEmbedding:
    sizes = architecture.vocab_size, architecture.hidden_size
    added = architecture.added_embeddings
    if added is None:
        return VocabParallelEmbedding(*sizes, context)
    assert architecture.embedding_scale == 1.0, "no family scales such embeddings"
    return PlacedEmbedding(*sizes, added, context)
