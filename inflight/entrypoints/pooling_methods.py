"""`PoolingMethods`: the methods of `LLM` that make vectors and scores of texts."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from inflight.config.engine import ModelConfig
from inflight.engine.request.processed import RequestOptions
from inflight.engine.request.prompt import Prompt, as_list
from inflight.entrypoints.llm_arguments import advice, as_prompts, one_each, one_of, priorities
from inflight.entrypoints.offline_engine import OfflineEngine
from inflight.entrypoints.pooled_values import (
    NO_INSTRUCTION,
    PairPrompts,
    comparison,
    scores_pairs,
    vectors_of,
    with_prompts,
)
from inflight.entrypoints.pooling_outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
)
from inflight.errors import InvalidRequestError
from inflight.interface.request import Float32Array
from inflight.outputs import RequestOutput
from inflight.pooling_params import Params, PoolingParams
from inflight.tokenizer.text_pair import PairLimits

GivenParams = PoolingParams | Sequence[PoolingParams] | None


class PoolingMethods(ABC):
    """The prompts of all methods are as those of `generate`. Requests of several tasks run in the same batches, and beside
    requests that generate text.

    Raises (all methods):
        InvalidRequestError: a prompt or a parameter is wrong, or the model does not do this. Nothing was computed.
        EngineError: a vector could not be computed, or has numbers that are NaN or infinite.
    """

    @abstractmethod
    def _run(
        self,
        argument: str,
        prompts: Sequence[Prompt],
        params: Sequence[Params | None],
        options: Sequence[RequestOptions],
        use_tqdm: bool,
    ) -> list[RequestOutput]: ...

    _engine: OfflineEngine
    _pairs: PairPrompts | None = None

    @property
    def _model(self) -> ModelConfig:
        return self._engine.model_config

    def embed(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        pooling_params: GivenParams = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        prompt_name: str | None = None,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """Make a vector of each prompt. The outputs are in the order of the prompts.

            [output] = llm.embed("A text", pooling_params=PoolingParams(dimensions=256))
            output.outputs.embedding  # a list of 256 numbers

        Args:
            prompt_name: the name of one of the model's prompts, such as "query": its text is put before each text. Default: the
                model's default prompt, if it has one.
        """
        given = self._with_prompt(as_prompts(prompts), prompt_name)
        found = self._vectors(given, pooling_params, "embed", use_tqdm, priority)
        return [_output(each, EmbeddingOutput(embedding=vectors[0].tolist())) for each, vectors in found]

    def classify(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        pooling_params: GivenParams = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """Return the probability of each class for each prompt."""
        labels = self._model.pooler.labels
        found = self._vectors(as_prompts(prompts), pooling_params, "classify", use_tqdm, priority)
        return [
            _output(each, ClassificationOutput(probs=vectors[0].tolist(), labels=labels)) for each, vectors in found
        ]

    def encode(
        self,
        prompts: Prompt | Iterable[Prompt],
        pooling_params: GivenParams = None,
        *,
        pooling_task: str | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the vectors of each prompt as an array: [size], or with a vector for each token [num_tokens, size].

        Args:
            pooling_task: "embed", "classify", "token_embed" or "token_classify". Default: what the model makes.
        """
        task = pooling_task or self._model.pooler.tasks[0]
        found = self._vectors(as_prompts(prompts), pooling_params, task, use_tqdm, priority)
        of_tokens = task.startswith("token_")
        return [_output(each, PoolingOutput(data=vectors if of_tokens else vectors[0])) for each, vectors in found]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        instruction: str | None = None,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Return a score for each pair: how well a text of `data_2`, a document, fits the text of `data_1` at its place, a
        query. One query is compared with all documents.

        A classifier with one class reads both texts together (a cross-encoder, or reranker), in its template if it has one. A
        model of embeddings compares vectors by their cosine, one with a vector for each token by MaxSim (ColBERT), with the
        model's prompts "query" and "document" before the texts.

        Args:
            instruction: what a document has to do for the query, for models whose template has a place for it. Default: the
                model's own.
        """
        reads_pairs = scores_pairs(self._model.pooler)
        firsts = _texts("data_1", data_1, reads_pairs=reads_pairs)
        seconds = _texts("data_2", data_2, reads_pairs=reads_pairs)
        if len(firsts) not in (1, len(seconds)):
            raise InvalidRequestError(
                f"data_1 has {len(firsts)} texts and data_2 has {len(seconds)}: give one text, or as many as data_2 has",
                "data_1",
            )
        if reads_pairs:
            return self._score_pairs(firsts, seconds, pooling_params, use_tqdm, instruction)
        if instruction:
            raise InvalidRequestError(NO_INSTRUCTION, "instruction")
        task, compare = comparison(self._model.pooler)
        firsts, seconds = with_prompts(self._model.pooler, firsts, seconds)
        found = self._vectors([*firsts, *seconds], pooling_params, task, use_tqdm, None)
        lefts, rights = found[: len(firsts)], found[len(firsts) :]
        if len(lefts) == 1:
            lefts = lefts * len(rights)
        return [
            PoolingRequestOutput(
                request_id=right.request_id,
                outputs=ScoringOutput(score=compare(left_vectors, right_vectors)),
                prompt_token_ids=left.prompt_token_ids + right.prompt_token_ids,
                num_cached_tokens=left.num_cached_tokens + right.num_cached_tokens,
            )
            for (left, left_vectors), (right, right_vectors) in zip(lefts, rights, strict=True)
        ]

    def _score_pairs(
        self,
        firsts: Sequence[str],
        seconds: Sequence[str],
        params: PoolingParams | None,
        use_tqdm: bool,
        instruction: str | None,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        if self._pairs is None:
            self._pairs = PairPrompts(self._engine.tokenizer, self._engine.chat_template, self._model)
        limits = PairLimits(None if params is None else params.truncate_prompt_tokens)
        lefts = [firsts[0]] * len(seconds) if len(firsts) == 1 else firsts
        prompts: list[Prompt] = []
        options = []
        for index, (one, other) in enumerate(zip(lefts, seconds, strict=True)):
            with one_of("data_2", index, len(seconds)):
                ids, parts = self._pairs.make(one, other, limits, instruction)
            prompts.append(ids)
            options.append(RequestOptions(parts=parts))
        wanted = [_of_task(params, "classify")] * len(prompts)
        outputs = self._run("data_2", prompts, wanted, options, use_tqdm)
        return [_output(each, ScoringOutput(score=float(vectors_of(each)[0, 0]))) for each in outputs]

    def _with_prompt(self, prompts: Sequence[Prompt], name: str | None) -> list[Prompt]:
        text = self._model.pooler.text_before(name)
        return [_with_text_before(each, text) for each in prompts] if text else list(prompts)

    def _vectors(
        self, prompts: Sequence[Prompt], params: GivenParams, task: str, use_tqdm: bool, priority: Sequence[int] | None
    ) -> list[tuple[RequestOutput, Float32Array]]:
        given = one_each(params, len(prompts), PoolingParams, "pooling_params")
        wanted = [_of_task(each, task) for each in given]
        options = [RequestOptions(priority=each) for each in priorities(priority, len(prompts))]
        outputs = self._run("prompts", prompts, wanted, options, use_tqdm)
        return [(output, vectors_of(output, self._model.pooler.step_tag)) for output in outputs]


def _texts(argument: str, given: object, *, reads_pairs: bool) -> list[str]:
    """A text, or several, as a list. `reads_pairs`: whether all of them must be texts; otherwise some may be token ids."""
    if isinstance(given, str):
        return [given]
    texts = None if isinstance(given, Mapping) else as_list(given)
    if texts is None:
        raise InvalidRequestError(
            f"{argument} must be a text or a list of texts, not a {type(given).__name__}{advice(given)}", argument
        )
    if not texts:
        raise InvalidRequestError(f"{argument} is empty: give at least one text", argument)
    for index, text in enumerate(texts):
        if not isinstance(text, str) and (reads_pairs or as_list(text) is None):
            raise InvalidRequestError(
                f"{argument}[{index}] is a {type(text).__name__}, and not a text", f"{argument}[{index}]"
            )
    return cast("list[str]", texts)


def _with_text_before(prompt: Prompt, text: str) -> Prompt:
    """The prompt with `text` before it, if it is a text. Token ids stay as they are."""
    if isinstance(prompt, str):
        return text + prompt
    if isinstance(prompt, Mapping) and isinstance(given := prompt.get("prompt"), str):
        return cast("Prompt", {**prompt, "prompt": text + given})
    return prompt


def _of_task(params: PoolingParams | None, task: str) -> PoolingParams:
    if params is None:
        return PoolingParams(task=task)
    if params.task not in (None, task):
        raise InvalidRequestError(
            f"pooling_params has task={params.task!r}, but the call is for {task!r}: leave task out", "pooling_params"
        )
    return replace(params, task=task)


def _output(output: RequestOutput, value: Any) -> PoolingRequestOutput[Any]:  # Any: one of the kinds of outputs
    return PoolingRequestOutput(
        request_id=output.request_id,
        outputs=value,
        prompt_token_ids=output.prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens,
    )
