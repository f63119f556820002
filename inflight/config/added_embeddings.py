"""`AddedEmbeddingsSpec`: learned embeddings beside those of the tokens, as encoders have them."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AddedEmbeddingsSpec:
    """Learned tables whose rows are added to the embedding of a token (layers/added_embeddings.py). The token at position p
    gets row p + `first_position` of the table of positions. 0: there is no such table.

    `factor_size`: all embeddings have so many numbers, which are not the hidden size: their sum is normed and then projected to
    the hidden size (arXiv:1909.11942, section 3.1)."""

    num_positions: int = 0
    first_position: int = 0
    num_types: int = 0
    factor_size: int | None = None
