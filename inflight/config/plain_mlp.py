"""`PlainMlpSpec`: an MLP without a gate."""

from dataclasses import dataclass
from typing import Literal

from inflight.config.architecture import GELU, MlpSpec


@dataclass(frozen=True, kw_only=True)
class PlainMlpSpec(MlpSpec):
    """The MLP of a layer without a gate: down(activation(up(x))). `size` is the number of outputs of up.

    `activation` is GELU, GELU_TANH, RELU or SILU.
    """

    kind: Literal["plain"] = "plain"
    size: int
    bias: bool = True
    activation: str = GELU

    @property
    def num_features(self) -> int:
        return 2 * self.size

    def fits(self, tp_size: int) -> bool:
        return self.size % tp_size == 0

    def __str__(self) -> str:
        return f"an intermediate size of {self.size}"
