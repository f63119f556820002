"""`Family`: how the config.json of one family becomes a `ModelArchitecture`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from inflight.config.architecture import ModelArchitecture
from inflight.config.families.family_fields import FamilyFields
from inflight.config.mixers import MIXER_KINDS
from inflight.config.mlp_kinds import MLP_KINDS
from inflight.config.pooler import ClassHead, MaskHead

# Fields that change the result of models of other families -> the values with which the field changes nothing. A config with
# any other value is refused. (): the field must be absent or null.
_NEUTRAL: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("partial_rotary_factor embedding_multiplier residual_multiplier logits_scaling logit_scale scale_emb", (1, 1.0)),
    ("use_bidirectional_attention use_qk_norm qk_layernorm alibi is_encoder_decoder", (False,)),
    ("num_experts num_local_experts", (0,)),
    ("no_rope_layers", ([],)),
    ("attention_multiplier scale_depth query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping", ()),
    ("logit_softcap logits_soft_cap clip_qkv attention_chunk_size quantization compression_config", ()),
)
_NEUTRAL_VALUES = {name: values for names, values in _NEUTRAL for name in names.split()}


# What `gguf_fields` finds beside keys of the file: the names of its tensors, and the content of the tensor with divisors of
# rotary frequencies, if the name is among `gguf_keys`. Otherwise the divisors must be those of Llama 3.
TENSORS = "tensors"
ROPE_FREQUENCIES = "rope_freqs"


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models: one file of this folder, and an entry in `families.FAMILIES`.

    `parse` makes the specification. It refuses fields whose value is not supported. `reads` has the names of those fields in
    `_NEUTRAL_VALUES` that `parse` reads itself. Those that a kind of layer reads are known to its specification. `others`: more
    architectures with the same layers, and with another head or none. `unread`: see `ModelArchitecture`. In a GGUF file the
    family's name is `gguf_name` (None: no GGUF file of the family is supported). `gguf_has_experts`: such a file has experts; a
    family without experts may have the same name. `gguf_interleaves_heads`: llama.cpp's converter changes the order of the rows
    of queries and keys. `gguf_tiles_value_heads`: it changes the order of the value heads of recurrent layers. `gguf_gating`:
    if several families have the same name, the values of the key expert_gating_func that this one has; None: the key is absent.
    `gguf_names`: keys of the file, without the family's name, -> the fields of config.json with the same values, where only
    this family has them. `gguf_fields` makes further fields of config.json from the keys of the file, of which it reads
    `gguf_keys`. `gguf_tensors`: names of a layer's tensors in the file -> their names in the model, where they are not those of
    most families. `class_head`: the layers for classes; None: those of a decoder. `mask_head`: those for masked tokens, which
    SPLADE reads.
    """

    architecture: str
    model_type: str
    parse: Callable[[FamilyFields], ModelArchitecture]
    others: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    gguf_name: str | None = None
    gguf_has_experts: bool = False
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    gguf_fields: Callable[[Mapping[str, object]], dict[str, object]] = lambda given: {}
    gguf_keys: tuple[str, ...] = ()
    gguf_tensors: Mapping[str, str] = field(default_factory=dict)
    gguf_interleaves_heads: bool = False
    gguf_tiles_value_heads: bool = False
    gguf_gating: tuple[int | None, ...] = ()
    class_head: ClassHead | None = None
    mask_head: MaskHead | None = None

    def from_gguf(self, given: Mapping[str, object]) -> dict[str, object]:
        """The fields of config.json that only this family has, from the keys of a GGUF file."""
        same = {name: given[key] for key, name in self.gguf_names.items() if key in given}
        return same | self.gguf_fields(given)

    def specify(self, fields: FamilyFields) -> ModelArchitecture:
        """
        Raises:
            UnsupportedModelError: a field has an impossible value, or a value that would change the result.
        """
        reads = (*(mixer.reads for mixer in MIXER_KINDS.values()), *(mlp.reads for mlp in MLP_KINDS.values()))
        self._refuse_unread(fields, {name for names in reads for name in names})
        architecture = self.parse(fields)
        if not fields.boolean("is_causal", True):
            architecture = in_both_directions(architecture)
        specs = (spec for layer in architecture.layers for spec in (layer.mixer, layer.mlp))
        self._refuse_unread(fields, {name for spec in specs for name in spec.reads})
        return replace(architecture, name=self.architecture, unread=(*self.unread, *architecture.unread))

    def _refuse_unread(self, fields: FamilyFields, read: set[str]) -> None:
        """Refuses fields that change the result, if neither the family nor its layers (`read`) take them into account."""
        for name, neutral in _NEUTRAL_VALUES.items():
            if name not in self.reads and name not in read and fields.has(name) and fields.values[name] not in neutral:
                raise fields.refusal(
                    f"{name}={fields.values[name]!r} is not supported for {self.architecture}; it would change the result"
                )


def in_both_directions(model: ModelArchitecture) -> ModelArchitecture:
    """The same model as an encoder. A head for tokens is left unread."""
    layers = tuple(
        layer if layer.attention is None else replace(layer, mixer=replace(layer.attention, is_causal=False))
        for layer in model.layers
    )
    return replace(model, layers=layers, has_head=False, tie_word_embeddings=False, unread=(*model.unread, "lm_head."))


def partial_rotation(given: Mapping[str, object]) -> dict[str, object]:
    """The share of each head that is rotated, from the keys of a GGUF file."""
    rotated = given.get("rope.dimension_count")
    head_dim = given["attention.key_length"]
    return (
        {"partial_rotary_factor": rotated / head_dim} if isinstance(rotated, int) and isinstance(head_dim, int) else {}
    )


def with_residual_scale(
    model: ModelArchitecture, residual: float, *, embedding_scale: float, logits_scale: float
) -> ModelArchitecture:
    """The same model, if every layer adds `residual` * output to the residual stream.

    Instead, the whole stream is divided by `residual`. It is read by norms only, and a norm gives the same result for x / r as
    for x, if its eps is divided by r^2. All other norms keep their eps.
    """
    return replace(
        model,
        embedding_scale=embedding_scale / residual,
        stream_eps=model.rms_norm_eps / residual**2,
        logits_scale=logits_scale,
    )
