"""`Mixer`: the base class of layers that bring the tokens of a sequence together, and what each is made with."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from inflight.attention.backend import LayerStep
from inflight.config.architecture import ModelArchitecture
from inflight.layers.attention import Attention
from inflight.layers.context import LayerContext
from inflight.layers.weights import Loadable


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerPlace:
    """Where a mixer is in the model.

    Attributes:
        layer: the number of its layer in the whole model.
        rotation_index: which of `LayerStep.rotations` is that of `MixerSpec.rotation`; any number if the mixer rotates nothing.
        owner: the attention whose keys and values it reads, if it has none of its own (`MixerSpec.kv_layer`).
    """

    architecture: ModelArchitecture
    layer: int
    rotation_index: int
    context: LayerContext
    owner: Attention | None = None


class Mixer(Loadable):
    """The mixer of one layer, with its projections. Its constructor takes the specification and a `MixerPlace`. What it keeps
    of a sequence is in a child of class `Attention` or `RecurrentState`: the runner finds these, and gives each its memory."""

    name: ClassVar[str] = "self_attn"  # of such layers in checkpoints

    @abstractmethod
    def forward(self, hidden: Tensor, step: LayerStep, rows: Tensor | None) -> Tensor:
        """hidden [num_tokens, hidden_size] -> [num_tokens, hidden_size]; with `rows`, only these tokens are in the result."""
