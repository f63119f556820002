"""`HiddenInputsSpec`: how a layer that predicts drafts joins hidden states of the served model with embeddings of tokens."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HiddenInputsSpec:
    """The names in the checkpoint of what such a layer has around it, without ".weight". None: it does not have this.

    The input of `layer` at position p is projection([embedding_norm(e), hidden_norm(h)]). Here e is the embedding of token
    p + 1, and h is the served model's hidden state at position p, behind its final norm. The result behind `final_norm` is
    h of position p + 1, and the head makes the logits of token p + 2 of it.

    With `captured`, h is made of the inputs of these layers of the served model, side by side: h = projection(inputs). They are
    the first pass's h only. `layer` then adds to h, or with `norm_replaces` to its norm, and its attention reads
    [embedding_norm(e), hidden_norm(h)], twice as wide. The result before `final_norm` is the next h.

    Attributes:
        has_bias: the projection has a bias.
        has_embedding, head_size: the checkpoint has an embedding, and a head for so many tokens, of its own. Otherwise (False,
            None) they are those of the served model.

    Sources: DeepSeek-V3 (arXiv:2412.19437), section 2.2; EAGLE (arXiv:2401.15077); EAGLE-3 (arXiv:2503.01840), section 3.
    """

    layer: str
    projection: str
    embedding_norm: str | None = None
    hidden_norm: str | None = None
    final_norm: str | None = None
    has_bias: bool = False
    captured: tuple[int, ...] = ()
    captured_size: int = 0  # all captured states of a token, side by side
    norm_replaces: bool = False
    has_embedding: bool = False
    head_size: int | None = None

    @property
    def parts(self) -> list[str]:
        named = (self.layer, self.embedding_norm, self.hidden_norm, self.projection, self.final_norm)
        return [name for name in named if name is not None]


# Qwen3-Next, Qwen3.5 and 3.6
NAMED_MTP = HiddenInputsSpec(
    layer="mtp.layers.0",
    embedding_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    projection="mtp.fc",
    final_norm="mtp.norm",
)


def numbered_mtp(layer: int) -> HiddenInputsSpec:
    """DeepSeek-V3 and GLM: all parts have the name of a layer behind the last one, which is number `layer`."""
    name = f"model.layers.{layer}"
    return HiddenInputsSpec(
        layer=name,
        embedding_norm=f"{name}.enorm",
        hidden_norm=f"{name}.hnorm",
        projection=f"{name}.eh_proj",
        final_norm=f"{name}.shared_head.norm",
    )
