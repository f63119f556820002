"""`resolve_pooler`: whether a model generates text or makes vectors, and what it makes of the hidden states of a prompt.

A model makes vectors (it is a *pooling model*, without a head) if its class in config.json has no head for text (LlamaModel,
LlamaForSequenceClassification), if its folder has the modules of sentence-transformers, or if the user says so.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from inflight.config.architecture import TRANSFORMERS, ModelArchitecture
from inflight.config.engine_args import EngineArgs
from inflight.config.families import ENCODERS
from inflight.config.families.vision_family import without_vision
from inflight.config.json_fields import JsonFields
from inflight.config.parse_architecture import family_of
from inflight.config.pooler import (
    ALL,
    CLASSIFY,
    CLS,
    EMBED,
    FOR_REWARDS,
    FOR_SEQUENCES,
    FOR_STEPS,
    FOR_TOKENS,
    GENERATING,
    IDENTITY,
    LAST,
    MEAN,
    NORMALIZE,
    POOLING_TYPES,
    SIGMOID,
    SOFTMAX,
    STEP,
    WITH_CLASSES,
    ClassHead,
    DenseSpec,
    PoolerSpec,
    base_and_end,
)
from inflight.config.prompted_reranker import (
    QWEN3_TEMPLATE,
    TokenId,
    has_prompt_fields,
    is_qwen3_reranker,
    prompted_reranker,
)
from inflight.config.sentence_transformers import activation_of_module, has_modules, read_logit_score, read_modules
from inflight.config.whole_prompts import is_causal
from inflight.errors import ConfigError, UnsupportedModelError

MAX_LABELS = 100_000
_KEYS = ("pooling_type", "use_activation", "dimensions", "step_tag_id")
# Fields of config.json that may change the pooler and not the layers
POOLER_FIELDS = frozenset(
    """architectures classifier_from_token is_original_qwen3_reranker method is_matryoshka matryoshka_dimensions num_labels
    id2label label2id problem_type sentence_transformers sbert_ce_default_activation_function""".split()
)
# their names in older versions of vLLM, and what they mean
_OLDER_KEYS = ("normalize", "activation", "softmax")


def resolve_pooler(
    args: EngineArgs,
    architecture: ModelArchitecture,
    config: Mapping[str, object],
    folder: Path,
    token_id: TokenId = lambda token: None,
) -> ModelArchitecture:
    """The model with its pooler, if it is a pooling model.

    Args:
        config: the content of config.json.
        token_id: finds a token in the vocabulary. Only prompted rerankers need it.

    Raises:
        ConfigError: the model cannot do what the user wants.
    """
    fields = JsonFields(config)
    bases_and_ends = [found for name in fields.name_or_names("architectures") if (found := base_and_end(name))[1]]
    base, end = bases_and_ends[0] if bases_and_ends else ("", "")
    is_qwen3 = is_qwen3_reranker(args.model or "", base)
    is_reranker = has_prompt_fields(fields) or is_qwen3
    # a model that brings its own code may be called "...Model" and have a head (ChatGLMModel)
    is_trunk = end == "Model" and not (architecture.implementation == TRANSFORMERS and fields.has("auto_map"))
    is_pooling = end in WITH_CLASSES or is_trunk or not architecture.has_head or has_modules(folder) or is_reranker
    if args.runner == "generate":
        if is_pooling and end != "ForCausalLM":
            raise ConfigError(
                f"runner='generate': config.json says that the model is a {_names(fields)}, which has no head for text; leave "
                "runner out"
            )
        return architecture
    if args.runner == "auto" and not is_pooling and args.convert in ("auto", "none"):
        return architecture
    spec = None
    if args.convert in ("auto", "classify"):
        # with layers of its own for classes, the model needs no tokens
        by_name = is_qwen3 and end == "ForCausalLM"
        spec = prompted_reranker(fields, architecture, read_logit_score(folder), token_id, is_qwen3=by_name)
    if spec is None:
        spec = _spec(args, architecture, fields, end, folder)
        if spec.task == CLASSIFY and is_qwen3:
            spec = replace(spec, pair_template=QWEN3_TEMPLATE)
    if architecture.implementation == TRANSFORMERS and any(layer.rows is not None for layer in spec.head):
        raise UnsupportedModelError(
            f"{architecture.name} is computed by transformers' code, whose head has no tokens to score with here"
            f"{f' ({architecture.not_native})' if architecture.not_native else ''}"
        )
    architecture = without_vision(architecture)
    return replace(
        architecture,
        pooler=with_options(spec, args.pooler_config),
        unread=(*architecture.unread, "lm_head."),
        tie_word_embeddings=False,
        has_head=False,
    )


def _spec(args: EngineArgs, architecture: ModelArchitecture, fields: JsonFields, end: str, folder: Path) -> PoolerSpec:
    wants_classes = args.convert == "classify" or (args.convert == "auto" and end in WITH_CLASSES)
    if not wants_classes:
        usual = GENERATING if is_causal(architecture) else replace(GENERATING, pooling_type=CLS)
        stored = fields.text("pooling_type", "")  # of a GGUF file
        if stored in (CLS, LAST, MEAN):
            usual = replace(usual, pooling_type=stored)
        spec = read_modules(folder, architecture.hidden_size) if has_modules(folder) else usual
        if spec.is_head_before:
            spec = replace(spec, head=_mask_head(architecture, fields))
        sizes = fields.values.get("matryoshka_dimensions")
        dimensions = tuple(sizes) if isinstance(sizes, list) and all(type(size) is int for size in sizes) else ()
        is_matryoshka = fields.boolean("is_matryoshka", False) or bool(dimensions)
        return replace(spec, dimensions=dimensions, is_matryoshka=is_matryoshka)
    if end in (FOR_REWARDS, FOR_STEPS):
        return reward_model(end, architecture.hidden_size)
    if end not in (FOR_SEQUENCES, FOR_TOKENS):
        raise ConfigError(
            f"convert='classify': config.json says that the model is a {_names(fields)}, which has no classification layer; "
            f"give a model whose name ends with {FOR_SEQUENCES} or {FOR_TOKENS}, or the tokens whose logits are the scores: "
            'hf_overrides={"classifier_from_token": ["no", "yes"], "method": "from_2_way_softmax"}'
        )
    name = next(name for name in fields.name_or_names("architectures") if name.endswith(end))
    family = family_of(name)
    if not is_causal(architecture) and family is None:
        raise UnsupportedModelError(f"{name}: the classification layers of this family are not supported")
    return classifier(fields, None if family is None else family.class_head, end, architecture.hidden_size)


def _mask_head(architecture: ModelArchitecture, fields: JsonFields) -> tuple[DenseSpec, ...]:
    """
    Raises:
        UnsupportedModelError: the model has no head for masked tokens, or not one that is known.
    """
    name = next((name for name in fields.name_or_names("architectures") if name.endswith("ForMaskedLM")), "")
    family = family_of(name) if name else None
    if family is None or family.mask_head is None:
        known = [f"{base_and_end(each.architecture)[0]}ForMaskedLM" for each in ENCODERS if each.mask_head is not None]
        raise UnsupportedModelError(
            f"sparse vectors need a {', '.join(known)}; config.json says that the model is a {_names(fields)}"
        )
    return family.mask_head.layers(fields, architecture.hidden_size, architecture.vocab_size)


def classifier(fields: JsonFields, head: ClassHead | None, end: str, hidden_size: int) -> PoolerSpec:
    """The pooler of a model with layers for classes, as transformers computes it. `head`: that of the family; None: the one
    layer that decoders have, for the last token or for each."""
    labels, of_tokens = labels_of(fields), end == FOR_TOKENS
    make_last = partial(DenseSpec, in_features=hidden_size, out_features=len(labels))
    before: tuple[DenseSpec, ...] = ()
    if head is None:
        last, pooling_type = make_last(name="score", bias=of_tokens), LAST
    else:
        last = make_last(name="classifier" if of_tokens else head.last, bias=True)
        before = head.before(fields, hidden_size) if not of_tokens or head.is_before_tokens else ()
        pooling_type = head.pooling_type(fields)
    return PoolerSpec(
        task=CLASSIFY,
        pooling_type=ALL if of_tokens else pooling_type,
        head=(*before, last),
        is_head_before=head is not None and not of_tokens and head.is_before_pooling(fields),
        activation=SOFTMAX if of_tokens else _activation_of_scores(fields, len(labels)),
        labels=labels,
    )


def reward_model(end: str, hidden_size: int) -> PoolerSpec:
    """The pooler of a reward model: the score of a prompt's last token. If it scores steps, the probabilities of wrong and of
    right at each token; those at the ends of steps count."""
    is_of_steps = end == FOR_STEPS
    labels = ("wrong", "right") if is_of_steps else ("reward",)
    make = partial(DenseSpec, in_features=hidden_size, bias=True)
    return PoolerSpec(
        task=CLASSIFY,
        pooling_type=ALL if is_of_steps else LAST,
        head=(
            make(name="score.0", out_features=hidden_size, activation="relu"),
            make(name="score.2", out_features=len(labels)),
        ),
        activation=SOFTMAX if is_of_steps else IDENTITY,
        labels=labels,
    )


def labels_of(fields: JsonFields) -> tuple[str, ...]:
    """The names of the classes: id2label, or LABEL_0 and so on; two of them if config.json says nothing, as in transformers."""
    named = fields.mapping("id2label").values
    count = fields.integer("num_labels", len(named) or 2)
    if count > MAX_LABELS:
        raise fields.refusal(f"num_labels={count} is more than {MAX_LABELS}, the most classes that are supported")
    labels = [named.get(str(index), f"LABEL_{index}") for index in range(count)]
    if wrong := [label for label in labels if not isinstance(label, str)]:
        raise fields.refusal(f"id2label has {wrong[0]!r}, which is not the name of a class")
    return tuple(map(str, labels))


def _activation_of_scores(fields: JsonFields, num_labels: int) -> str:
    """What sentence-transformers has stored in config.json, now or in its older form, or what transformers does."""
    stored = fields.mapping("sentence_transformers").values.get("activation_fn")
    stored = stored or fields.values.get("sbert_ce_default_activation_function")
    return activation_of_module(stored) or activation_of(fields, num_labels)


def activation_of(fields: JsonFields, num_labels: int) -> str:
    """What makes probabilities of scores, as transformers' pipeline chooses it."""
    problem = fields.text("problem_type", "")
    if problem == "regression":
        return IDENTITY
    return SIGMOID if problem == "multi_label_classification" or num_labels == 1 else SOFTMAX


def generating(args: EngineArgs) -> PoolerSpec:
    """How a model that generates text makes vectors."""
    may_cut = (args.hf_overrides or {}).get("is_matryoshka") is True
    return with_options(replace(GENERATING, is_matryoshka=may_cut), args.pooler_config)


def with_options(spec: PoolerSpec, options: Mapping[str, Any] | None) -> PoolerSpec:  # Any: checked here
    """`spec` with the values of --pooler-config.

    Raises:
        ConfigError: a key or a value is wrong.
    """
    for key, value in (options or {}).items():
        if key in ("pooling_type", "seq_pooling_type", "tok_pooling_type"):
            if str(value).upper() not in POOLING_TYPES:
                raise ConfigError(f"pooler_config: {key}={value!r} is not one of {', '.join(POOLING_TYPES)}")
            spec = replace(spec, pooling_type=str(value).upper())
        elif key == "use_activation" or key in _OLDER_KEYS:
            if not isinstance(value, bool):
                raise ConfigError(f"pooler_config: {key}={value!r} is not true or false")
            usual = NORMALIZE if spec.task == EMBED else spec.activation
            spec = replace(spec, activation=usual if value else IDENTITY)
        elif key == "dimensions":
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"pooler_config: dimensions={value!r} is not a positive integer")
            spec = replace(spec, dimensions=(value,), is_matryoshka=True)
        elif key == "step_tag_id":
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"pooler_config: step_tag_id={value!r} is not the id of a token")
            spec = replace(spec, step_tag=value)
        else:
            raise ConfigError(f"pooler_config has no key {key!r}; it has {', '.join(_KEYS)}")
    return _with_steps(spec)


def _with_steps(spec: PoolerSpec) -> PoolerSpec:
    """
    Raises:
        ConfigError: the pooling type and the token that ends a step do not fit.
    """
    if spec.pooling_type != STEP:
        if spec.step_tag is not None:
            raise ConfigError("pooler_config: step_tag_id needs pooling_type='STEP'")
        return spec
    if spec.task != CLASSIFY:
        raise ConfigError(
            "pooler_config: pooling_type='STEP' needs a model that classifies, such as a ...ForProcessRewardModel"
        )
    if spec.step_tag is None:
        raise ConfigError("pooler_config: pooling_type='STEP' needs step_tag_id, the id of the token that ends a step")
    return replace(spec, pooling_type=ALL)


def _names(fields: JsonFields) -> str:
    return ", ".join(fields.name_or_names("architectures")) or "model without a name"
