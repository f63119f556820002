"""`MoeSpec`: a layer with a mixture of experts, and `RouterSpec`: how a token's experts are chosen. `DenseAndMoeSpec`: a dense
MLP beside them. `share_read`: how much of a model's weights a step reads. See docs/moe.md."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from inflight.config.architecture import SIGMOID, SILU, GatedMlpSpec, MlpSpec, ModelArchitecture

SOFTMAX = "softmax"
SPARSE_MIXER = "sparse_mixer"
SCORINGS = (SOFTMAX, SIGMOID, SPARSE_MIXER)
MANY_TOKENS = 100_000  # a step of so many tokens reads all experts
# The score of a group of experts: the highest score in it, or the sum of the two highest.
HIGHEST = "highest"
TWO_HIGHEST = "two_highest"
GROUP_SCORINGS = (HIGHEST, TWO_HIGHEST)


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """How the router chooses `top_k` experts for a token, and how their results are weighted.

    The router computes a logit for each expert. The scores are the softmax of the logits over all experts, or the sigmoid of
    each logit (`scoring`). The experts with the highest scores are chosen. Their weights are their scores; if `renormalizes`,
    divided by their sum plus `sum_offset`, so that scores that are all 0 give weights of 0; then multiplied by `scale`. (A
    softmax over the logits of the chosen experts only is SOFTMAX with `renormalizes`.)

    With SPARSE_MIXER (arXiv:2409.12136) the scores are the logits, and each chosen expert has a softmax of its own for its
    weight: over those experts whose logits are near to its own, without the experts that were chosen before. A logit x is near
    to a higher one h if (h - x) / max(|x|, h) is at most twice `jitter`.

    `has_choice_bias`: the checkpoint has a number for each expert, which is added to the score for the choice, but not for the
    weight. With `num_groups` > 1, the experts are divided into so many groups of neighbours. Only experts of the `top_groups`
    groups with the highest scores can be chosen. The score of a group is made from the scores for the choice (`group_scoring`).

    `bias`: the linear layer of the router has a bias. `choice_bias_is_row`: the checkpoint has the bias for the choice as a
    matrix of one row. `has_expert_scale`: the checkpoint has a number for each expert, by which the expert's weight is
    multiplied at last.
    """

    top_k: int
    scoring: str = SOFTMAX
    renormalizes: bool = False
    scale: float = 1.0
    sum_offset: float = 1e-20
    jitter: float = 0.0
    bias: bool = False
    has_choice_bias: bool = False
    choice_bias_is_row: bool = False
    has_expert_scale: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_scoring: str = HIGHEST

    def problem(self, num_experts: int) -> str | None:
        """Why so many experts cannot be routed in this way; None if they can."""
        if not 1 <= self.top_k <= num_experts:
            return f"{self.top_k} of {num_experts} experts cannot be chosen"
        if not 1 <= self.top_groups <= self.num_groups:
            return f"{self.top_groups} of {self.num_groups} groups of experts cannot be chosen"
        if self.num_groups == 1:
            return None
        if num_experts % self.num_groups:
            return f"{num_experts} experts cannot be divided into {self.num_groups} groups"
        size = num_experts // self.num_groups
        if self.group_scoring == TWO_HIGHEST and size < 2:
            return f"{self.num_groups} groups of {num_experts} experts have no second score"
        if self.top_k > self.top_groups * size:
            return f"{self.top_groups} groups of {size} experts do not have {self.top_k} experts"
        return None


@dataclass(frozen=True, kw_only=True)
class MoeSpec(MlpSpec):
    """A mixture of experts: each token is computed by the experts that the router chooses for it, and the results are added.

    An expert is a gated MLP (`GatedMlpSpec`) of size `size`. If `shared_size` is not 0, a shared expert of this size computes
    each token, too. With `has_shared_gate`, its result is multiplied by the sigmoid of one more logit. `activation`: as in
    `GatedMlpSpec`, or SWIGLU_OAI. `bias`: the projections gate, up and down have biases.
    """

    by_transformers_on_gpu = True

    kind: Literal["moe"] = "moe"
    num_experts: int
    size: int
    router: RouterSpec
    activation: str = SILU
    bias: bool = False
    shared_size: int = 0
    has_shared_gate: bool = False

    @property
    def num_features(self) -> int:
        """See `MlpSpec`. A token is multiplied by the weights of its own experts only."""
        return 3 * (self.router.top_k * self.size + self.shared_size) + self.num_experts

    def num_features_read(self, num_tokens: int) -> float:
        """A step of many tokens reads almost all experts: each token leaves out an expert with the probability
        1 - top_k / num_experts, if the router is balanced."""
        share_read = 1 - (1 - self.router.top_k / self.num_experts) ** num_tokens
        return 3 * (self.num_experts * share_read * self.size + self.shared_size) + self.num_experts

    def fits(self, tp_size: int) -> bool:
        return self.size % tp_size == 0 and self.shared_size % tp_size == 0

    def __str__(self) -> str:
        shared = f" and a shared one of size {self.shared_size}" if self.shared_size else ""
        return f"experts of size {self.size}{shared}"


@dataclass(frozen=True, kw_only=True)
class DenseAndMoeSpec(MlpSpec):
    """A gated MLP and a mixture of experts side by side, whose results are added (layers/dense_and_moe.py). Both read the
    residual stream. The input and the result of each have a norm with `eps`, and the router's input has a norm of its own."""

    kind: Literal["dense_and_moe"] = "dense_and_moe"
    dense: GatedMlpSpec
    moe: MoeSpec
    eps: float

    @property
    def num_features(self) -> int:
        return self.dense.num_features + self.moe.num_features

    def num_features_read(self, num_tokens: int) -> float:
        return self.dense.num_features_read(num_tokens) + self.moe.num_features_read(num_tokens)

    def fits(self, tp_size: int) -> bool:
        return self.dense.fits(tp_size) and self.moe.fits(tp_size)

    def __str__(self) -> str:
        return f"{self.dense}, and {self.moe}"


def share_read(architecture: ModelArchitecture) -> Callable[[int], float] | None:
    """Returns a function: number of tokens of a step -> the share of the layers' weights that the step is expected to read.
    Returns None if every step reads all weights."""
    mlps = Counter(layer.mlp for layer in architecture.layers)
    mixers = sum(layer.mixer.num_features for layer in architecture.layers)

    def num_read(num_tokens: int) -> float:
        return mixers + sum(count * mlp.num_features_read(num_tokens) for mlp, count in mlps.items())

    whole = num_read(MANY_TOKENS)
    if num_read(1) == whole:
        return None
    return lru_cache(maxsize=4096)(lambda num_tokens: num_read(num_tokens) / whole)
