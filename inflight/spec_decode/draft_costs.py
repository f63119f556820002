"""`DraftCosts`: what drafts cost in time. Measured at the start, or estimated from the sizes of the models."""

from dataclasses import dataclass

from inflight.config.architecture import ModelArchitecture

# How many more tokens a step could compute in the time in which it computes none (it reads the weights): about 19 with a model
# of 0.6 billion parameters in bf16 on two cores, from 1 to 8 tokens.
FREE_TOKENS = {"cpu": 16.0, "cuda": 256.0}
_FREE_BOUNDS = (1.0, 1000.0)  # of what is measured


@dataclass(frozen=True)
class DraftCosts:
    """
    Attributes:
        free_tokens: a step of n tokens takes a time in proportion to `free_tokens` + n.
        share_of_step: the time of a drafter's pass / the time of a step of the served model, with one token each.
    """

    free_tokens: float
    share_of_step: float = 0.0

    @classmethod
    def of_seconds(cls, one: float, more: float, num_more: int, draft: float) -> "DraftCosts":
        """
        Args:
            one, more: seconds of a step of 1 token, and of one of `num_more` tokens.
            draft: seconds of a drafter's pass of one token; 0 if there is no model that drafts.
        """
        low, high = _FREE_BOUNDS
        per_token = (more - one) / (num_more - 1)
        free = one / per_token - 1 if per_token > 0 else high
        return cls(min(max(free, low), high), draft / one)


def num_weights_read(model: ModelArchitecture) -> int:
    """About how many weights a step of one token reads."""
    spec = model.hidden_inputs
    joined = 0 if spec is None else spec.captured_size or 2 * model.hidden_size
    num_tokens = model.vocab_size if spec is None or spec.head_size is None else spec.head_size
    features = sum(each.mixer.num_features + each.mlp.num_features for each in model.layers)
    return model.hidden_size * (num_tokens + joined + features)
