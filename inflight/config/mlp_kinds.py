"""`MLP_KINDS`: the kinds of MLPs that a layer may have. To add a kind, see docs/extending.md."""

from inflight.config.architecture import GatedMlpSpec, MlpSpec
from inflight.config.experts import DenseAndMoeSpec, MoeSpec
from inflight.config.plain_mlp import PlainMlpSpec

# kind -> specification: what a message may have as `LayerSpec.mlp` (interface/codec.py)
MLP_KINDS: dict[str, type[MlpSpec]] = {
    each.kind: each for each in (GatedMlpSpec, MoeSpec, DenseAndMoeSpec, PlainMlpSpec)
}
