"""`HiddenInputsSpec`: how a layer that predicts drafts joins hidden states of the served model with embeddings of tokens."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HiddenInputsSpec:
    """The names in the checkpoint of what such a layer has around it, without ".weight".

    The input of `layer` at position p is projection([embedding_norm(e), hidden_norm(h)]). Here e is the embedding of token
    p + 1, and h is the served model's hidden state at position p, behind its final norm. The result behind `final_norm` is
    h of position p + 1, and the served model's head makes the logits of token p + 2 of it.

    Source: DeepSeek-V3 (arXiv:2412.19437), section 2.2.
    """

    layer: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str


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
