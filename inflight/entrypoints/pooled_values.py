"""Scores of two texts: from their vectors, or from a model that reads both together."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from inflight.config.engine import ModelConfig
from inflight.config.pooler import CLASSIFY, PoolerSpec
from inflight.errors import EngineError, InvalidRequestError
from inflight.interface.part_kinds import PART_KINDS
from inflight.interface.parts import RequestPart
from inflight.interface.request import Float32Array
from inflight.outputs import RequestOutput
from inflight.tokenizer.chat_template import ChatTemplate
from inflight.tokenizer.prompted_pair import PairTemplate, PromptedPairs
from inflight.tokenizer.text_pair import PairLimits, TextPairs
from inflight.tokenizer.tokenizer import Tokenizer

_Text = TypeVar("_Text")
NO_PAIRS = "this model classifies single texts: it has no score for a pair of texts"
NO_INSTRUCTION = "instruction needs a model whose template has a place for it, and this model has none: leave it out"


def scores_pairs(pooler: PoolerSpec) -> bool:
    """Whether the model reads the two texts of a pair together: a classifier of texts with one class."""
    return pooler.task == CLASSIFY and "classify" in pooler.tasks and len(pooler.labels) == 1


class PairPrompts:
    """Makes a prompt of two texts: by the model's template, if it has one for pairs, else as its tokenizer joins two texts."""

    def __init__(self, tokenizer: Tokenizer | None, chat_template: ChatTemplate | None, model: ModelConfig) -> None:
        """
        Raises:
            InvalidRequestError: there is no tokenizer, or the model has no form for a pair.
        """
        if tokenizer is None:
            raise InvalidRequestError("scores need a tokenizer, and the engine has none (skip_tokenizer_init=True)")
        pooler = model.pooler
        template = PairTemplate.find(chat_template, pooler.template_variables)
        if template is None and pooler.pair_template:
            template = PairTemplate(ChatTemplate({"default": pooler.pair_template}))
        self._plain = TextPairs(tokenizer, model.max_model_len) if template is None else None
        self._prompted = (
            None
            if template is None
            else PromptedPairs(tokenizer, template, model.max_model_len, pooler.text_before(None))
        )

    def make(
        self, one: str, other: str, limits: PairLimits, instruction: str | None = None
    ) -> tuple[list[int], tuple[RequestPart, ...]]:
        """The token ids of a pair, and the parts of its request. Raises as `encode` of `TextPairs` and `PromptedPairs`.

        Raises:
            InvalidRequestError: there is an instruction, and the model has no template for it.
        """
        if self._prompted is not None:
            return self._prompted.encode(one, other, limits, instruction).token_ids, ()
        assert self._plain is not None
        if instruction:
            raise InvalidRequestError(NO_INSTRUCTION, "instruction")
        ids, second = self._plain.encode(one, other, limits)
        # Any: the table has the class of each kind, and this one has the field `first`
        return ids, () if second is None else (PART_KINDS["token_types"](first=second),)  # type: ignore[call-arg]


def with_prompts(
    pooler: PoolerSpec, queries: Sequence[_Text], documents: Sequence[_Text]
) -> tuple[list[_Text | str], list[_Text | str]]:
    """The texts of a comparison of vectors, with the model's prompts "query" and "document" before them, or with its default
    prompt. Inputs that are not texts, such as lists of token ids, stay as they are."""
    prompts = dict(pooler.prompts)
    usual = prompts.get(pooler.default_prompt, "")

    def begun(name: str, texts: Sequence[_Text]) -> list[_Text | str]:
        before = prompts.get(name, usual)
        return [before + text if isinstance(text, str) else text for text in texts]

    return begun("query", queries), begun("document", documents)


def vectors_of(output: RequestOutput, step_tag: int | None = None) -> Float32Array:
    """The vectors of a request: float32 [1, size], or with a vector for each token [num_tokens, size]. With a `step_tag`, only
    those of such tokens are left.

    Raises:
        EngineError: the request has failed, or a number is NaN or infinite.
    """
    if output.error:
        raise EngineError(f"request {output.request_id} failed: {output.error}")
    vectors: Float32Array = output.parts["pooling"]
    if not np.isfinite(vectors).all():
        raise EngineError(
            f"request {output.request_id}: its vector has numbers that are NaN or infinite; the weights may be damaged, or "
            "their dtype has too small a range: try dtype='float32'"
        )
    if step_tag is None:
        return vectors
    of_steps: Float32Array = vectors[np.array(output.prompt_token_ids) == step_tag]
    return of_steps


def comparison(pooler: PoolerSpec) -> tuple[str, Callable[[Float32Array, Float32Array], float]]:
    """The task whose vectors are compared to score two texts, and what compares them.

    Raises:
        InvalidRequestError: the model makes no vectors.
    """
    if "embed" in pooler.tasks:
        return "embed", dot if pooler.is_head_before else cosine
    if "token_embed" in pooler.tasks:
        return "token_embed", max_sim
    raise InvalidRequestError(NO_PAIRS, "task")


def cosine(one: Float32Array, other: Float32Array) -> float:
    """The cosine of the angle between two vectors, [1, size] each; 0 if one of them is 0."""
    left, right = one[0].astype(np.float64), other[0].astype(np.float64)
    length = float(np.linalg.norm(left) * np.linalg.norm(right))
    return float(left @ right) / length if length else 0.0


def dot(one: Float32Array, other: Float32Array) -> float:
    """The product of two vectors, [1, size] each: how sparse vectors are compared."""
    return float(one[0].astype(np.float64) @ other[0].astype(np.float64))


def max_sim(query: Float32Array, document: Float32Array) -> float:
    """For each token of the query the best match in the document, summed (ColBERT). [num_tokens, size] each."""
    return float((query.astype(np.float64) @ document.astype(np.float64).T).max(axis=1).sum())
