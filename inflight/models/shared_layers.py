"""`SharedLayers`: layers that have their weights together (`LayerSpec.stored_layer`), as in ALBERT (arXiv:1909.11942)."""

from collections.abc import Iterator, Sequence

from inflight.config.architecture import LayerSpec
from inflight.layers.decoder_attention import DecoderAttention
from inflight.layers.layer_norm import stored_name
from inflight.layers.weights import Loadable
from inflight.models.decoder_layer import DecoderLayer


class SharedLayers:
    """The first layer of a stage with a `stored_layer` has the weights, and lends them to all later ones. Caches and the norm
    before the attention are each layer's own.

    Args:
        specs: of the layers of a stage.
        first: the number of the stage's first layer in the whole model.
    """

    def __init__(self, layers: Sequence[DecoderLayer], specs: Sequence[LayerSpec], first: int) -> None:
        self._layers = layers
        self._stored = [
            layer if spec.stored_layer is None else spec.stored_layer for layer, spec in enumerate(specs, first)
        ]
        self._owners: dict[int, DecoderLayer] = {}
        for stored, layer in zip(self._stored, layers, strict=True):
            owner = self._owners.setdefault(stored, layer)
            if owner is not layer:
                _lend(owner, layer)

    def load_units(self) -> Iterator[tuple[str, Loadable]]:
        """See `CausalLM.load_units`."""
        for stored, layer in zip(self._stored, self._layers, strict=True):
            name = f"model.layers.{stored}"
            if self._owners[stored] is layer:
                yield from layer.separate_units(name)
                yield name, layer
            elif layer.before_attention is not None:
                assert layer.norm_names.before_attention is not None
                yield stored_name(name, layer.norm_names.before_attention), layer.before_attention


def _lend(owner: DecoderLayer, layer: DecoderLayer) -> None:
    lent, own = owner.self_attn, layer.self_attn
    assert isinstance(lent, DecoderAttention) and isinstance(own, DecoderAttention), "no other kind is shared"
    own.qkv_proj, own.o_proj = lent.qkv_proj, lent.o_proj
    layer.mlp, layer.before_mlp = owner.mlp, owner.before_mlp
