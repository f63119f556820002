"""`prompted_reranker`: a text model reads a query and a document in a template, and the logits of tokens such as "yes" and "no"
say whether they fit. Such a model is a classifier whose layer is made of rows of the head.

A model is recognised as one by these, in this order: `classifier_from_token` in config.json or --hf-overrides (vLLM's fields),
the module LogitScore of sentence-transformers, the name of a Qwen3-Reranker.
"""

import re
from collections.abc import Callable
from dataclasses import replace

from inflight.config.architecture import ModelArchitecture
from inflight.config.json_fields import JsonFields
from inflight.config.pooler import CLASSIFY, LAST, SIGMOID, SOFTMAX, DenseSpec, HeadRows, PoolerSpec
from inflight.config.sentence_transformers import LogitScore, activation_of_module
from inflight.errors import ConfigError

# The template of Qwen3-Reranker, whose files have only that of chats. A message "system" is the instruction.
QWEN3_TEMPLATE = (
    "<|im_start|>system\n"
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
    "<Instruct>: {{ messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first | default("
    "'Given a web search query, retrieve relevant passages that answer the query', true) }}\n"
    "<Query>: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}\n"
    "<Document>: {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>{{ '\\n\\n' }}"
)
_QWEN3_TOKENS = ("no", "yes")
_QWEN3_NAME = re.compile(r"qwen3-reranker-\d", re.IGNORECASE)
_TOKENS = "classifier_from_token"
_DIFFERENCE, _EACH = "from_2_way_softmax", "no_post_processing"

TokenId = Callable[[str], int | None]  # the id of a token, by its text


def is_qwen3_reranker(model: str, base: str) -> bool:
    """Whether the name says that a model is a Qwen3-Reranker. `model`: a folder, a file, an id on the hub, or a path in the
    cache of the hub. `base`: the family, as transformers calls it."""
    of_cache = re.search(r"models--[^/\\]*", model)
    name = of_cache[0] if of_cache else re.split(r"[/\\]", model.rstrip("/\\"))[-1]
    return base == "Qwen3" and _QWEN3_NAME.search(name) is not None


def prompted_reranker(
    fields: JsonFields, architecture: ModelArchitecture, module: LogitScore | None, token_id: TokenId, *, is_qwen3: bool
) -> PoolerSpec | None:
    """The pooler of a prompted reranker; None if the model is not one.

    Args:
        fields: config.json with --hf-overrides.
        module: the module LogitScore of the model's folder; None if it has none.
        is_qwen3: whether the model is called Qwen3-Reranker.

    Raises:
        ConfigError: a field is wrong, or the vocabulary does not have the tokens.
    """
    is_qwen3 = is_qwen3 or fields.boolean("is_original_qwen3_reranker", False)
    template = QWEN3_TEMPLATE if is_qwen3 else ""
    if fields.has(_TOKENS):
        ids = [_id_of(token, token_id) for token in _tokens(fields)]
        usual = _DIFFERENCE if is_qwen3 else _EACH
        rows = _rows(ids, fields.text("method", usual), architecture.vocab_size)
    elif module is not None:
        rows = HeadRows(tokens=(module.true_token,), minus=module.false_token, vocab_size=architecture.vocab_size)
    elif is_qwen3:
        no, yes = (_id_of(token, token_id) for token in _QWEN3_TOKENS)
        rows = HeadRows(tokens=(yes,), minus=no, vocab_size=architecture.vocab_size)
    else:
        return None
    _check_head(architecture)
    num_scores = len(rows.tokens)
    spec = PoolerSpec(
        task=CLASSIFY,
        pooling_type=LAST,
        head=(
            DenseSpec(
                name="model.embed_tokens" if architecture.tie_word_embeddings else "lm_head",
                in_features=architecture.hidden_size,
                out_features=num_scores,
                rows=rows,
            ),
        ),
        activation=activation_of_module(fields.mapping("sentence_transformers").values.get("activation_fn"))
        or (SIGMOID if num_scores == 1 else SOFTMAX),
        labels=tuple(f"LABEL_{index}" for index in range(num_scores)),
        pair_template=template,
    )
    if module is None:
        return spec
    return replace(
        spec,
        activation=module.activation or spec.activation,
        prompts=module.prompts,
        default_prompt=module.default_prompt,
        max_length=module.max_length,
        template_variables=module.template_variables,
    )


def has_prompt_fields(fields: JsonFields) -> bool:
    """Whether config.json or --hf-overrides make a prompted reranker of the model."""
    return fields.has(_TOKENS) or fields.boolean("is_original_qwen3_reranker", False)


def _tokens(fields: JsonFields) -> list[str]:
    given = fields.values[_TOKENS]
    if not isinstance(given, list | tuple) or not given or not all(isinstance(each, str) for each in given):
        raise ConfigError(f'{_TOKENS}={given!r} is not a list of tokens, such as ["no", "yes"]')
    return list(given)


def _id_of(token: str, token_id: TokenId) -> int:
    found = token_id(token)
    if found is None:
        raise ConfigError(
            f"the tokenizer has no token {token!r}, whose logit would be the score: give {_TOKENS} with tokens of this model"
        )
    return found


def _rows(ids: list[int], method: str, vocab_size: int) -> HeadRows:
    if method == _EACH:
        return HeadRows(tokens=tuple(ids), vocab_size=vocab_size)
    if method != _DIFFERENCE:
        raise ConfigError(f"method={method!r} is not one of {_DIFFERENCE}, {_EACH}")
    if len(ids) != 2:
        raise ConfigError(f'{_TOKENS} has {len(ids)} tokens, but {_DIFFERENCE} needs two: ["no", "yes"]')
    return HeadRows(tokens=(ids[1],), minus=ids[0], vocab_size=vocab_size)


def _check_head(architecture: ModelArchitecture) -> None:
    if not architecture.has_head or architecture.head_bias or architecture.logits_cap is not None:
        raise ConfigError(
            f"{architecture.name} cannot score with the logits of tokens: its head has a bias or a cap, or there is none"
        )
    if architecture.logits_scale != 1.0:
        raise ConfigError(f"{architecture.name} cannot score with the logits of tokens: its logits are scaled")
