"""`PoolerSpec`: what a pooling model makes of the hidden states of a text: one vector, scores, or a vector for each token."""

from collections.abc import Callable
from dataclasses import dataclass

from inflight.config.json_fields import JsonFields
from inflight.errors import InvalidRequestError

# Which hidden states of a prompt become its vector: that of the first token, of the last one, the mean of all, of each number
# the largest; ALL: each token has a vector of its own. STEP: those of the tokens that end a step of an answer; a `PoolerSpec`
# says it by ALL and `step_tag`.
CLS, LAST, MEAN, MAX, ALL, STEP = "CLS", "LAST", "MEAN", "MAX", "ALL", "STEP"
POOLING_TYPES = (CLS, LAST, MEAN, MAX, ALL, STEP)

EMBED, CLASSIFY = "embed", "classify"

IDENTITY = "identity"
NORMALIZE = "normalize"  # divides a vector by its length
SOFTMAX, SIGMOID = "softmax", "sigmoid"
# Of SPLADE: log(1 + max(x, 0)), and the logarithm of that again
LOG1P_RELU, LOG1P_LOG1P_RELU = "log1p_relu", "log1p_log1p_relu"

# Ends of the names of transformers' classes
FOR_SEQUENCES, FOR_TOKENS = "ForSequenceClassification", "ForTokenClassification"
# ... and of the classes of Qwen2.5's reward models, which their folders bring: a score of an answer, or of each of its steps
FOR_REWARDS, FOR_STEPS = "ForRewardModel", "ForProcessRewardModel"
WITH_CLASSES = (FOR_SEQUENCES, FOR_TOKENS, FOR_REWARDS, FOR_STEPS)
_ENDS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", *WITH_CLASSES, "Model")


def base_and_end(name: str) -> tuple[str, str]:
    """Divides the name of a class of transformers: "LlamaForCausalLM" -> "Llama", "ForCausalLM"."""
    end = next((end for end in _ENDS if name.endswith(end) and name != end), "")
    return name.removesuffix(end), end


@dataclass(frozen=True, kw_only=True)
class HeadRows:
    """Rows of the head for tokens: a score is the logit of a token.

    Attributes:
        tokens: the ids of the tokens, one for each score.
        minus: the id of the token whose logit is subtracted from each score; None for none.
        vocab_size: how many rows the head has.
    """

    tokens: tuple[int, ...]
    minus: int | None = None
    vocab_size: int


@dataclass(frozen=True, kw_only=True)
class DenseSpec:
    """A linear layer behind the pooling, and its activation: "identity", "tanh", "relu", "gelu", "gelu_tanh", "silu".

    Attributes:
        name: the name of its weight in the checkpoint, without ".weight".
        bias_name: the name of the bias, if it is not that of the weight with ".bias".
        norm: the name of a LayerNorm behind the activation, which may have a bias (`norm_bias`); "" for none. `norm_eps` is
            added to its variance.
        file: the safetensors file that has it, if it is not among the model's own files; its path from the model's folder.
        rows: which rows of the weight are read; None for all. `name` is then that of the head, or of the embedding if they
            share their weights.
    """

    name: str
    in_features: int
    out_features: int
    bias: bool = False
    bias_name: str = ""
    activation: str = IDENTITY
    norm: str = ""
    norm_bias: bool = False
    norm_eps: float = 1e-5
    file: str = ""
    rows: HeadRows | None = None


@dataclass(frozen=True, kw_only=True)
class ClassHead:
    """The layers of a family's classes of transformers for sequences and for tokens.

    Attributes:
        last: the name of the last layer for sequences. That for tokens is "classifier".
        before: the layers before it, from config.json and the hidden size.
        is_before_tokens: whether the class for tokens has these layers, too.
        pooling_type: which hidden states a sequence's are, from config.json.
        is_before_pooling: whether the layers for sequences are computed for each token, and then pooled; from config.json.
    """

    last: str
    before: Callable[[JsonFields, int], tuple[DenseSpec, ...]]
    is_before_tokens: bool = False
    pooling_type: Callable[[JsonFields], str] = lambda fields: CLS
    is_before_pooling: Callable[[JsonFields], bool] = lambda fields: False


@dataclass(frozen=True, kw_only=True)
class MaskHead:
    """The names of the head of a family's class for masked tokens (`...ForMaskedLM`): a layer of the hidden size with an
    activation, its LayerNorm, and the layer for the vocabulary, which may share the weights of the embedding.
    `activation_field`: the field of config.json with the activation; "": it is GELU."""

    dense: str
    norm: str
    decoder: str
    bias: str
    activation_field: str = "hidden_act"

    def layers(self, fields: JsonFields, hidden_size: int, vocab_size: int) -> tuple[DenseSpec, ...]:
        activation = fields.text(self.activation_field, "gelu") if self.activation_field else "gelu"
        if activation not in ("gelu", "relu", "silu"):
            raise fields.refusal(f"{self.activation_field}={activation!r} is not supported in a head for masked tokens")
        is_tied = fields.boolean("tie_word_embeddings", True)
        return (
            DenseSpec(
                name=self.dense,
                in_features=hidden_size,
                out_features=hidden_size,
                bias=True,
                activation=activation,
                norm=self.norm,
                norm_bias=True,
                norm_eps=fields.number("layer_norm_eps", 1e-12),
            ),
            DenseSpec(
                name="model.embed_tokens" if is_tied else self.decoder,
                in_features=hidden_size,
                out_features=vocab_size,
                bias=True,
                bias_name=self.bias,
            ),
        )


@dataclass(frozen=True, kw_only=True)
class PoolerSpec:
    """
    Attributes:
        task: EMBED or CLASSIFY.
        pooling_type: one of POOLING_TYPES, but not STEP.
        head: layers behind the pooling, or with `is_head_before` before it, so that they are computed for each token.
        activation: the function that is applied last, unless a request switches it off (use_activation): NORMALIZE of an
            embedding, SOFTMAX or SIGMOID of the scores of a classifier, or IDENTITY.
        labels: the names of the classes, in the order of the scores; empty for an embedding.
        prompts: names and texts that are put before a text.
        default_prompt: the name of the one that is used if a request names none; "" for none.
        dimensions: the sizes to which a vector may be cut (Matryoshka); empty if any size may be asked for.
        is_matryoshka: whether vectors may be cut.
        max_length: the longest text in tokens, if the user does not choose it; None for the model's own limit.
        pair_template: a Jinja template for a pair of texts, as the messages "query" and "document"; "" if only the model's chat
            template can have one.
        template_variables: names and values of further variables of the template.
        step_tag: with ALL: only the scores of this token are returned; None: of all tokens.
    """

    task: str
    pooling_type: str
    head: tuple[DenseSpec, ...] = ()
    is_head_before: bool = False
    activation: str = IDENTITY
    labels: tuple[str, ...] = ()
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str = ""
    dimensions: tuple[int, ...] = ()
    is_matryoshka: bool = False
    max_length: int | None = None
    pair_template: str = ""
    template_variables: tuple[tuple[str, bool | int | str], ...] = ()
    step_tag: int | None = None

    @property
    def tasks(self) -> tuple[str, ...]:
        """What the model does, by the names of `PoolingParams.task`. The first one is the default."""
        of_tokens = f"token_{self.task}"
        if self.pooling_type == ALL:
            return (of_tokens,)
        return (self.task, of_tokens) if self.task == EMBED and not self.is_head_before else (self.task,)

    def text_before(self, name: str | None) -> str:
        """The text that is put before a text: the prompt `name`, or the default one.

        Raises:
            InvalidRequestError: there is no prompt of this name.
        """
        known = dict(self.prompts)
        if name is not None and name not in known:
            raise InvalidRequestError(
                f"prompt_name={name!r} is not a prompt of this model; it has {', '.join(known) or 'none'}",
                "prompt_name",
            )
        return known.get(name or self.default_prompt, "")

    def size(self, hidden_size: int) -> int:
        """How many numbers a vector has."""
        return self.head[-1].out_features if self.head else hidden_size


# how a model that generates text makes vectors, if the user does not say it
GENERATING = PoolerSpec(task=EMBED, pooling_type=LAST, activation=NORMALIZE)
