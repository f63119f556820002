"""`DecoderLayer`: one layer of a decoder: a mixer, an MLP, and the norms that its specification names."""

from dataclasses import asdict

import torch
from torch import Tensor, nn

from inflight.attention.backend import LayerStep
from inflight.layers.layer_norm import make_norm, stored_name
from inflight.layers.mixer import MixerPlace
from inflight.layers.norm import RMSNorm
from inflight.layers.token_inputs import TokenInput
from inflight.layers.weights import Loadable, WeightSlot, WeightSlots
from inflight.models.layer_kinds import MIXERS, MLPS


class DecoderLayer(Loadable):
    """Mixer and MLP. The input of each is the residual stream, and its output is added to the stream. `LayerSpec.norms`
    says which inputs and outputs have a norm.

    The MLP's output is added by the next layer. If the next layer begins with a norm, one kernel both adds and norms.
    """

    def __init__(self, place: MixerPlace) -> None:
        super().__init__()
        architecture, context = place.architecture, place.context
        spec = architecture.layers[place.layer]
        names = spec.norms
        sizes = (architecture.hidden_size, architecture.rms_norm_eps)
        self.before_attention = make_norm(architecture, context, reads_stream=True) if names.before_attention else None
        self.self_attn = MIXERS[type(spec.mixer)](spec.mixer, place)
        self.after_attention = make_norm(architecture, context) if names.after_attention else None
        self.before_mlp = make_norm(architecture, context, reads_stream=True) if names.before_mlp else None
        self.mlp = MLPS[type(spec.mlp)](architecture.hidden_size, spec.mlp, context)
        self.after_mlp = make_norm(architecture, context) if names.after_mlp else None
        inputs = architecture.token_inputs
        self.token_input = None if inputs is None else TokenInput(*sizes, inputs, context)
        ones = torch.ones(1, dtype=torch.float32, device=context.device)
        self.scalar = nn.Parameter(ones, False) if spec.has_scalar else None
        self.norm_names, self.ops, self.layer = names, context.ops, place.layer

    def weight_slots(self, prefix: str) -> WeightSlots:
        names = asdict(self.norm_names) | {"self_attn": self.self_attn.name}
        for name, child in self.named_children():
            if isinstance(child, Loadable):
                yield from child.weight_slots(stored_name(prefix, names.get(name, name)))
        if self.scalar is not None:
            yield f"{prefix}.layer_scalar", WeightSlot(shape=(1,), destination=self.scalar.data, is_scale=True)

    def forward(
        self, delta: Tensor | None, residual: Tensor, step: LayerStep, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`delta` is the output of the previous layer, not yet added to `residual`. Returns this layer's delta, and `residual`,
        changed in place. The layer may change its own vectors of `step.token_inputs`.

        Keys and values are written for all tokens. With `rows`, everything after the attention is computed for these tokens
        only.
        """
        hidden = self._add(delta, residual, self.before_attention)
        if "before_attention" in self.norm_names.replacing:
            residual = hidden
        hidden = self.self_attn(hidden, step, rows)
        if self.after_attention is not None:
            hidden = self.after_attention(hidden)
        if rows is not None:
            residual = self.ops.select_rows(residual, rows)
        hidden = self._add(hidden, residual, self.before_mlp)
        if "before_mlp" in self.norm_names.replacing:
            residual = hidden
        hidden = self.mlp(hidden)
        if self.after_mlp is not None:
            hidden = self.after_mlp(hidden)
        if self.token_input is not None:
            assert step.token_inputs is not None, "the model has made none"
            vectors = step.token_inputs[:, self.layer]
            self.ops.add_and_scale(residual, hidden, None)
            hidden = self.token_input(residual, vectors if rows is None else self.ops.select_rows(vectors, rows))
        if self.scalar is not None:
            for part in (residual, hidden):
                self.ops.add_and_scale(part, None, self.scalar)
        return hidden, residual

    def _add(self, delta: Tensor | None, residual: Tensor, norm: RMSNorm | None) -> Tensor:
        """Adds `delta` (None: nothing) to `residual` in place. Returns the norm of the sum (None: the sum itself)."""
        if norm is None:
            if delta is not None:
                self.ops.add_and_scale(residual, delta, None)
            return residual
        normed: Tensor = norm(residual) if delta is None else norm.add_and_norm(delta, residual)
        return normed
