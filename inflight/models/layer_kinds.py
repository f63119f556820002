"""`MIXERS` and `MLPS`: the layer that computes each kind of specification. To add a kind, see docs/extending.md."""

from collections.abc import Callable
from typing import Any

from inflight.config.architecture import GatedMlpSpec, MlpSpec
from inflight.config.experts import DenseAndMoeSpec, MoeSpec
from inflight.config.mixers import AttentionSpec, GatedDeltaSpec, LatentAttentionSpec, MixerSpec, ShortConvSpec
from inflight.config.plain_mlp import PlainMlpSpec
from inflight.layers.context import LayerContext
from inflight.layers.decoder_attention import DecoderAttention
from inflight.layers.dense_and_moe import DenseAndMoe
from inflight.layers.gated_delta import GatedDeltaMixer
from inflight.layers.gated_mlp import GatedMLP
from inflight.layers.latent_attention import LatentAttention
from inflight.layers.mixer import Mixer, MixerPlace
from inflight.layers.moe import FusedMoE
from inflight.layers.plain_mlp import PlainMLP
from inflight.layers.short_conv import ShortConvMixer
from inflight.layers.weights import Loadable

# Any: the class of specification that is the key
MIXERS: dict[type[MixerSpec], Callable[[Any, MixerPlace], Mixer]] = {
    AttentionSpec: DecoderAttention,
    LatentAttentionSpec: LatentAttention,
    GatedDeltaSpec: GatedDeltaMixer,
    ShortConvSpec: ShortConvMixer,
}
# made with the hidden size, the specification and the context; called with the hidden states of all tokens
MLPS: dict[type[MlpSpec], Callable[[int, Any, LayerContext], Loadable]] = {
    GatedMlpSpec: GatedMLP,
    MoeSpec: FusedMoE,
    DenseAndMoeSpec: DenseAndMoe,
    PlainMlpSpec: PlainMLP,
}
