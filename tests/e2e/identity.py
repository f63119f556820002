"""What the identity tests share: engines by their features, schedules of requests, and the comparison with the plain run.

The plain run of a request is that of a synchronous engine with every feature off, which serves it alone. Numbers that two
orders of summation leave within `MARGIN` of each other are a tie: `check_tie` finds it in transformers' logits, and counts it.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import numpy.typing as npt
import torch

from inflight import LLM, RequestOutput, SamplingParams
from inflight.engine.request.processed import RequestOptions
from inflight.engine.start.kv_cache_sizing import blocks_per_sequence, make_groups
from inflight.entrypoints.llm_engine import LLMEngine
from inflight.interface.images import ImagesPart
from inflight.interface.kv_cache import KVCacheSpec
from inflight.interface.request import ResolvedSampling
from inflight.pooling_params import Params, PoolingParams
from inflight.sample.noise import log_exponential, noise_words, token_hashes
from inflight.sample.seeds import derive_seed, draw_keys
from inflight.structured_output.llguidance_backend import LLGuidanceBackend
from inflight.structured_output.manager import MaskRequest, StructuredOutputManager
from tests.conftest import FULL
from tests.support.drafts import verify_all_drafts
from tests.support.erratic_times import ErraticTimes, limit_times
from tests.support.image_chats import reference_inputs
from tests.support.model_zoo import reference_model

MARGIN = 1e-4
MAX_STEPS = 2000  # of one example; more is an engine that does not end

POOLING = "pooling"  # a field: the request makes vectors, and this is the task of its PoolingParams

IMAGES = "images"  # a field: the ImagesPart of the prompt

# prompt, fields of SamplingParams, steps to run after it has been added, whether the request before it is aborted then
Event = tuple[list[int], dict[str, Any], int, bool]


def examples(count: int, subject: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Settings of a property of many models. Each `subject` has examples of its own. Otherwise all subjects would have the same
    ones in `make test`, because hypothesis then draws them by the code of the test."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        test = hypothesis.settings(max_examples=count)(test)
        return test if FULL else hypothesis.seed(zlib.crc32(subject.encode()))(test)

    return decorate


@dataclass(frozen=True)
class Features:
    """`plans_ahead` is depth 2 on one stage, and one step more than a pipeline needs on several; None is the default."""

    caching: bool
    chunk: int | None  # token budget of a step; None: a prompt is never cut
    tight: bool  # KV cache for one sequence of the longest length only
    max_num_seqs: int
    plans_ahead: bool | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    expert_parallel: bool = False
    num_drafts: int = 0
    draft_method: str = "ngram"
    draft_model: Path | None = None
    offloads: bool = False  # to a host pool; it needs the prefix cache
    resumed_at: tuple[int, ...] = ()  # before these steps the core loses all requests, and the front end resumes them

    def arguments(self, max_model_len: int) -> dict[str, Any]:
        """Those of `LLM`, but for the size of the KV cache."""
        arguments: dict[str, Any] = {
            "enable_prefix_caching": self.caching or self.offloads,
            "enable_chunked_prefill": self.chunk is not None,
            "max_num_batched_tokens": self.chunk or max_model_len,
            "max_num_seqs": self.max_num_seqs,
        }
        if self.tensor_parallel_size > 1 or self.pipeline_parallel_size > 1:
            arguments["tensor_parallel_size"] = self.tensor_parallel_size
            arguments["pipeline_parallel_size"] = self.pipeline_parallel_size
            arguments["enable_expert_parallel"] = self.expert_parallel
            if self.pipeline_parallel_size > 1:  # not measured: that takes as long as many examples
                arguments["pipeline_stagger"] = self.pipeline_parallel_size + self.tight
        if self.offloads:
            arguments["kv_offloading_size"] = 2**-8
        if self.num_drafts:
            drafting = {"method": self.draft_method, "num_speculative_tokens": self.num_drafts}
            model = {} if self.draft_model is None else {"model": str(self.draft_model)}
            arguments["speculative_config"] = {**drafting, **model}
        if self.plans_ahead is not None and self.pipeline_parallel_size == 1:
            arguments["async_scheduling"] = self.plans_ahead
        elif self.plans_ahead:
            arguments["pipeline_depth"] = self.pipeline_parallel_size + 2
        return arguments

    @property
    def engine(self) -> Features:
        """The features of the engine itself."""
        return replace(self, resumed_at=(), draft_method=self.draft_method if self.num_drafts else "ngram")


PLAIN = Features(caching=False, chunk=None, tight=False, max_num_seqs=1, plans_ahead=False)


@dataclass
class Engines:
    """Engines of one model, made once for each set of features, and the plain runs' outputs.

    `arguments` are those of all engines but the plain one; `shared` those of all.
    """

    folder: Path
    block_size: int
    # of transformers. Any: families with images have classes of their own
    reference: Callable[[Path], Any] = reference_model
    arguments: dict[str, Any] = field(default_factory=dict)
    llms: dict[Features, LLM] = field(default_factory=dict)
    plain_outputs: dict[str, RequestOutput] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=lambda: {"skip_tokenizer_init": True})
    max_model_len: int = 96
    specs: dict[Features, list[dict[str, KVCacheSpec]]] = field(default_factory=dict)
    num_tokens: int = 0
    num_ties: int = 0
    num_vectors: int = 0

    def llm(self, features: Features) -> LLM:
        features = features.engine
        if features not in self.llms:
            memory = self._tight_bytes(features) if features.tight else 1 << 21
            arguments = {
                "dtype": "float32",
                "max_model_len": self.max_model_len,
                "block_size": self.block_size,
                "kv_cache_memory_bytes": memory,
                "generation_config": "none",
                "num_threads": 1,
                **self.shared,
                **features.arguments(self.max_model_len),
                **({} if features == PLAIN else self.arguments),
            }
            with verify_all_drafts():
                self.llms[features] = LLM(str(self.folder), **arguments)
            if features.chunk is not None:
                # every step has another time limit, so prompts and drafts are cut at other places in each run
                limits = {"target_seconds": None, "max_step_seconds": 1.0, "long_prefill_token_threshold": 24}
                scheduler = self.llms[features].llm_engine.core.scheduler
                limit_times(scheduler, self.block_size, ErraticTimes(seed=0), **limits)
        return self.llms[features]

    def _tight_bytes(self, features: Features) -> int:
        ranks = make_groups(self._specs(features))
        ahead = features.num_drafts if features.draft_method not in ("ngram", "suffix") else 0
        blocks = blocks_per_sequence(
            ranks[0],
            num_tokens=self.max_model_len + ahead,
            max_step_tokens=(features.chunk or self.max_model_len) + ahead,
        )
        return (1 + blocks) * max(
            len(group.layer_names) * group.spec.block_bytes for groups in ranks for group in groups
        )

    def _specs(self, features: Features) -> list[dict[str, KVCacheSpec]]:
        """Of each rank. They depend on the ranks and the drafts alone, so one engine of each layout is asked; one of threads,
        which starts sooner."""
        layout = replace(
            PLAIN,
            tensor_parallel_size=features.tensor_parallel_size,
            pipeline_parallel_size=features.pipeline_parallel_size,
            num_drafts=features.num_drafts,
            draft_method=features.draft_method,
            draft_model=features.draft_model,
            plans_ahead=None,
        )
        if layout not in self.specs:
            arguments = {**self.arguments, "distributed_executor_backend": "uni"}
            threads = replace(self, arguments=arguments, llms={})
            self.specs[layout] = threads.llm(layout).llm_engine.executor.get_kv_cache_specs()
            threads.close()
        return self.specs[layout]

    def plain(self, prompt: list[int], params: Params, images: ImagesPart | None = None) -> RequestOutput:
        key = repr((prompt, params, images and images.contents))
        if key not in self.plain_outputs:
            run, options = self.llm(PLAIN)._run, options_of(images)
            (self.plain_outputs[key],) = run("prompts", [prompt], [params], [options], use_tqdm=False)
        return self.plain_outputs[key]

    def close(self, but: Features | None = None) -> None:
        """Close all engines, or all `but` one."""
        for features in [features for features in self.llms if features != but]:
            self.llms.pop(features).close()


def run_example(engines: Engines, features: Features, events: list[Event]) -> None:
    engine = engines.llm(features).llm_engine
    engine.core.reset_prefix_cache()
    params = [make_params(fields, seed=i) for i, (_, fields, _, _) in enumerate(events)]
    images = [fields.get(IMAGES) for _, fields, _, _ in events]
    try:
        outputs = run_schedule(engine, events, params, features.resumed_at)
    finally:
        engine.abort_requests([f"r{i}" for i in range(len(events))])  # of an example that failed
    for i, output in outputs.items():
        plain = engines.plain(events[i][0], params[i], images[i])
        compare(engines, output, plain, params[i], images[i])


def run_schedule(
    engine: LLMEngine, events: list[Event], params: list[Params], resumed_at: tuple[int, ...] = ()
) -> dict[int, RequestOutput]:
    """The requests that were not aborted, by the number of their event."""
    outputs: dict[str, RequestOutput] = {}
    aborted: set[int] = set()
    step_numbers = itertools.count()

    def step() -> None:
        if next(step_numbers) in resumed_at:
            resume(engine)
        outputs.update({output.request_id: output for output in engine.step()})
        engine.core.scheduler.check_integrity()

    for i, (prompt, fields, num_steps, aborts) in enumerate(events):
        engine.add_request(f"r{i}", prompt, params[i], **options_of(fields.get(IMAGES)))
        for _ in range(num_steps):
            step()
        if aborts and i:
            engine.abort_requests([f"r{i - 1}"])
            engine.core.scheduler.check_integrity()
            aborted.add(i - 1)
    for _ in range(MAX_STEPS):
        if not engine.has_unfinished_requests():
            break
        step()
    assert not engine.core.scheduler.has_unfinished_requests()
    engine.core.scheduler.check_integrity()
    return {i: outputs[f"r{i}"] for i in range(len(events)) if i not in aborted}


def resume(engine: LLMEngine) -> None:
    """The core loses all requests and its prefix cache, and gets what the front end knows of them. No step is in flight then,
    because a new core has none: the ids of the requests are used again."""
    engine.core.collective_rpc("check_health")  # commits the steps in flight
    states = engine._output_processor.unfinished()
    engine.core.abort_requests([sequence.request_id for state in states for sequence in state.request.sequences])
    engine.core.reset_prefix_cache()
    for state, sequences in [(state, state.resumed_sequences()) for state in states]:
        for sequence in sequences:
            engine.core.add_request(sequence, state.request.prompt_array)


def options_of(images: ImagesPart | None) -> RequestOptions:
    return {} if images is None else {"parts": (images,)}


def make_params(fields: dict[str, Any], seed: int) -> Params:
    fields = {name: value for name, value in fields.items() if name != IMAGES}
    if POOLING in fields:
        return PoolingParams(task=fields[POOLING])
    fields = {"seed": seed, **fields}
    if fields.get("temperature") == 0.0:
        fields["n"] = min(fields.get("n", 1), 2)  # all are equal, so more of them find no more
    fields["min_tokens"] = min(fields.get("min_tokens", 0), fields["max_tokens"])
    return SamplingParams(**fields)


def compare(
    engines: Engines, got: RequestOutput, plain: RequestOutput, params: Params, images: ImagesPart | None = None
) -> None:
    if isinstance(params, PoolingParams):
        np.testing.assert_allclose(got.parts["pooling"], plain.parts["pooling"], atol=2e-6, err_msg=str(params))
        assert got.metrics is not None and got.metrics.first_token_time is None
        engines.num_vectors += len(got.parts["pooling"])
        return
    for ours, theirs in zip(got.outputs, plain.outputs, strict=True):
        engines.num_tokens += len(theirs.token_ids)
        if ours.token_ids != theirs.token_ids:
            check_tie(engines, got.prompt_token_ids, ours.token_ids, theirs.token_ids, params, ours.index, images)
            continue
        assert (ours.finish_reason, ours.stop_reason) == (theirs.finish_reason, theirs.stop_reason), (got, plain)
        assert ours.text == theirs.text
        assert_close(ours.logprobs, theirs.logprobs)
    assert got.error == plain.error
    assert_close(got.prompt_logprobs, plain.prompt_logprobs)


def assert_close(ours: list[Any] | None, theirs: list[Any] | None) -> None:
    assert (ours is None) == (theirs is None)
    for a, b in zip(ours or [], theirs or [], strict=True):
        if a is None or b is None:
            assert a is b
            continue
        # the last of the most probable may change places with the next one
        assert max(abs(a[token].logprob - b[token].logprob) for token in set(a) & set(b)) < 1e-3
        assert len(set(a) ^ set(b)) <= 2


def check_tie(
    engines: Engines,
    prompt: list[int],
    ours: list[int],
    theirs: list[int],
    params: SamplingParams,
    index: int,
    images: ImagesPart | None = None,
) -> None:
    """The first token that differs must have been a tie in the reference, as near as rounding can tell."""
    position = next(i for i, (a, b) in enumerate(itertools.zip_longest(ours, theirs)) if a != b)
    said = f"tokens differ at {position}: {ours} and {theirs}, with {params}"
    assert position < min(len(ours), len(theirs)), said
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0), said  # those cut at places that rounding moves
    scores = reference_scores(engines, prompt, theirs[:position], params, index, images)
    gap = abs(scores[ours[position]] - scores[theirs[position]])
    assert gap < MARGIN, f"{said}, by {gap:.2g}"
    engines.num_ties += 1


def reference_scores(
    engines: Engines,
    prompt: list[int],
    emitted: list[int],
    params: SamplingParams,
    index: int,
    images: ImagesPart | None = None,
) -> npt.NDArray[np.float64]:
    """By transformers' logits: the next token of completion `index` is that of the highest score. [vocab_size]"""
    model = engines.reference(engines.folder)
    given = reference_inputs(model, prompt + emitted, () if images is None else images.images)
    logits = model(**given).logits[0, -1]
    scores = process_logits(engines, logits.detach().numpy().astype(np.float64), prompt, emitted, params)
    if params.greedy:
        return scores
    seed = derive_seed(derive_seed(params.seed or 0, 0), index)
    keys = draw_keys(np.array([seed], dtype=np.uint64), np.array([len(prompt) + len(emitted)]))
    words = noise_words(token_hashes(len(scores), torch.device("cpu")), torch.from_numpy(keys))
    noise: npt.NDArray[np.float64] = log_exponential(words)[0].numpy()
    return scores / params.temperature - noise


def allowed_tokens(
    engines: Engines, vocab_size: int, sampling: ResolvedSampling, emitted: list[int]
) -> npt.NDArray[np.bool_]:
    """What a grammar and a bound for the reasoning admit after the emitted tokens. [vocab_size]"""
    tokenizer = engines.llm(PLAIN).llm_engine.tokenizer
    assert tokenizer is not None and tokenizer.eos_token_id is not None
    grammar = LLGuidanceBackend(tokenizer, vocab_size, [tokenizer.eos_token_id])
    manager = StructuredOutputManager(lambda: grammar, vocab_size, num_buffers=1)
    constraint, frame = sampling.params.structured_outputs, sampling.answer_frame
    manager.submit("r", constraint, frame=frame, emitted_token_ids=emitted).result(timeout=300)
    assert not manager.failure("r")
    row = manager.fill([MaskRequest("r")]).masks[0]
    manager.close()
    return np.unpackbits(row.view(np.uint8), bitorder="little")[:vocab_size].astype(bool)


def process_logits(
    engines: Engines, logits: npt.NDArray[np.float64], prompt: list[int], emitted: list[int], params: SamplingParams
) -> npt.NDArray[np.float64]:
    """A grammar's mask, allowed tokens, bias and penalties, as the sampler's documentation has them. In place."""
    is_allowed = np.ones(len(logits), dtype=bool)
    sampling = None
    if params.structured_outputs is not None or params.thinking_token_budget is not None:
        processor = engines.llm(PLAIN).llm_engine._input_processor
        sampling = processor.process("r", prompt, params).sequences[0].sampling
    if sampling is not None and (params.structured_outputs is not None or sampling.answer_frame is not None):
        is_allowed = allowed_tokens(engines, len(logits), sampling, emitted)
    if params.allowed_token_ids is not None:
        is_allowed[:] = False
        is_allowed[list(params.allowed_token_ids)] = True
    logits[~is_allowed] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    for token in {*prompt, *emitted}:
        logits[token] *= params.repetition_penalty if logits[token] < 0 else 1 / params.repetition_penalty
    for token in set(emitted):
        logits[token] -= params.frequency_penalty * emitted.count(token) + params.presence_penalty
    return logits
