"""Every feature on or off, in every combination: the tokens are those of the request alone in a plain engine.

An example draws an engine (prefix cache, chunked prefill, KV cache large or so small that requests are preempted, slots),
requests (shared beginnings, n > 1, greedy and sampled, penalties, stop conditions, log-probabilities) and a schedule (arrivals
between steps, aborts). `make test` runs a fixed share of the 1,000 examples that `make test-full` runs.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight import LLM, RequestOutput, SamplingParams
from inflight.kv_cache.sizing import blocks_per_sequence, make_groups
from inflight.sample.noise import log_exponential, token_hashes
from inflight.sample.seeds import derive_seed, draw_keys
from tests.model_zoo import FAMILY_CONFIGS, VOCAB_SIZE, reference_model, write_model

NUM_EXAMPLES = 1000 if os.environ.get("INFLIGHT_TEST_FULL") == "1" else 40
MAX_MODEL_LEN, MAX_TOKENS = 96, 12
# (family, configuration, block size): head_dim 16 in blocks of 16 goes to the C++ attention kernel, others to plain torch
MODELS = {
    "full attention": ("llama", 1, 4),
    "full attention, C++": ("llama", 0, 16),
    "mixed windows": ("qwen3", 4, 4),
    "mixed windows, C++": ("qwen3", 4, 16),
}
MARGIN = 1e-4


@dataclass(frozen=True)
class Features:
    caching: bool
    chunk: int | None  # token budget of a step; None: a prompt is never cut
    tight: bool  # KV cache for one sequence of the longest length only
    max_num_seqs: int


PLAIN = Features(caching=False, chunk=None, tight=False, max_num_seqs=1)
FEATURES = st.builds(
    Features,
    caching=st.booleans(),
    chunk=st.sampled_from([None, 5, 16]),
    tight=st.booleans(),
    max_num_seqs=st.sampled_from([2, 5]),
)
PROMPTS = st.builds(
    lambda base, length, tail: [3 + base] * length + tail,
    st.integers(0, 2),
    st.integers(1, 60),
    st.lists(st.integers(3, 6), max_size=20),
)
PARAMS = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, MAX_TOKENS), "ignore_eos": st.booleans()},
    optional={
        "temperature": st.sampled_from([0.0, 0.7, 1.0, 1.5]),
        "n": st.integers(1, 3),
        "seed": st.integers(0, 99),
        "top_p": st.sampled_from([0.6, 0.9]),
        "top_k": st.sampled_from([3, 40]),
        "min_p": st.sampled_from([0.05]),
        "repetition_penalty": st.sampled_from([1.3]),
        "frequency_penalty": st.sampled_from([0.5]),
        "presence_penalty": st.sampled_from([-0.5]),
        "min_tokens": st.integers(0, 4),
        "stop_token_ids": st.lists(st.integers(3, VOCAB_SIZE - 1), max_size=40),
        "logprobs": st.integers(0, 3),
        "prompt_logprobs": st.integers(0, 2),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.floats(-5, 5), max_size=3),
    },
)
EVENTS = st.lists(st.tuples(PROMPTS, PARAMS, st.integers(0, 6), st.booleans()), min_size=1, max_size=8)


@dataclass
class Engines:
    """Engines of one model, made once for each set of features, and the plain runs' outputs.

    `arguments` are those of all engines but the plain one.
    """

    folder: Path
    block_size: int
    arguments: dict[str, Any] = field(default_factory=dict)
    llms: dict[Features, LLM] = field(default_factory=dict)
    plain_outputs: dict[str, RequestOutput] = field(default_factory=dict)
    num_tokens: int = 0
    num_ties: int = 0

    def llm(self, features: Features) -> LLM:
        if features not in self.llms:
            memory = 1 << 24
            if features.tight:
                ranks = make_groups(self.llm(replace(features, tight=False)).llm_engine.executor.get_kv_cache_specs())
                blocks = blocks_per_sequence(
                    ranks[0], num_tokens=MAX_MODEL_LEN, max_step_tokens=features.chunk or MAX_MODEL_LEN
                )
                largest = max(len(group.layer_names) * group.spec.block_bytes for groups in ranks for group in groups)
                memory = (1 + blocks) * largest
            self.llms[features] = LLM(
                str(self.folder),
                skip_tokenizer_init=True,
                dtype="float32",
                max_model_len=MAX_MODEL_LEN,
                block_size=self.block_size,
                enable_prefix_caching=features.caching,
                enable_chunked_prefill=features.chunk is not None,
                max_num_batched_tokens=features.chunk or MAX_MODEL_LEN,
                max_num_seqs=features.max_num_seqs,
                kv_cache_memory_bytes=memory,
                generation_config="none",
                num_threads=1,
                **({} if features == PLAIN else self.arguments),
            )
        return self.llms[features]

    def plain(self, prompt: list[int], params: SamplingParams) -> RequestOutput:
        key = repr((prompt, params))
        if key not in self.plain_outputs:
            (self.plain_outputs[key],) = self.llm(PLAIN).generate([prompt], params, use_tqdm=False)
        return self.plain_outputs[key]


@pytest.fixture(scope="module", params=MODELS)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    family, index, block_size = MODELS[request.param]
    folder = write_model(FAMILY_CONFIGS[family][index], tmp_path_factory.mktemp("identity") / "model", seed=1)
    found = Engines(folder, block_size)
    yield found
    for llm in found.llms.values():
        llm.close()
    print(f"{request.param}: {found.num_tokens} tokens, {found.num_ties} ties, {len(found.llms)} engines")


def test_tokens_do_not_depend_on_features_or_company(engines: Engines) -> None:
    @settings(max_examples=NUM_EXAMPLES)
    @given(features=FEATURES, events=EVENTS)
    def check(features: Features, events: list[tuple[list[int], dict[str, Any], int, bool]]) -> None:
        run_example(engines, features, events)

    check()


def run_example(
    engines: Engines, features: Features, events: list[tuple[list[int], dict[str, Any], int, bool]]
) -> None:
    engine = engines.llm(features).llm_engine
    engine.core.reset_prefix_cache()
    wanted: dict[str, tuple[list[int], SamplingParams]] = {}
    outputs: dict[str, RequestOutput] = {}

    def step() -> None:
        outputs.update({output.request_id: output for output in engine.step()})
        engine.core.scheduler.check_integrity()

    for i, (prompt, fields, num_steps, aborts) in enumerate(events):
        params = make_params(fields, seed=i)
        wanted[f"r{i}"] = (prompt, params)
        engine.add_request(f"r{i}", prompt, params)
        for _ in range(num_steps):
            step()
        if aborts and i:
            engine.abort_requests([f"r{i - 1}"])
            engine.core.scheduler.check_integrity()
            wanted.pop(f"r{i - 1}")
    for _ in range(2000):
        if not engine.has_unfinished_requests():
            break
        step()
    assert not engine.core.scheduler.has_unfinished_requests()
    for request_id, (prompt, params) in wanted.items():
        compare(engines, outputs[request_id], engines.plain(prompt, params), params)


def make_params(fields: dict[str, Any], seed: int) -> SamplingParams:
    fields = {"seed": seed, **fields}
    if fields.get("temperature") == 0.0:
        fields["n"] = 1
    fields["min_tokens"] = min(fields.get("min_tokens", 0), fields["max_tokens"])
    return SamplingParams(**fields)


def compare(engines: Engines, got: RequestOutput, plain: RequestOutput, params: SamplingParams) -> None:
    for ours, theirs in zip(got.outputs, plain.outputs, strict=True):
        engines.num_tokens += len(theirs.token_ids)
        if ours.token_ids != theirs.token_ids:
            check_tie(engines, got.prompt_token_ids, ours.token_ids, theirs.token_ids, params, ours.index)
            continue
        assert (ours.finish_reason, ours.stop_reason) == (theirs.finish_reason, theirs.stop_reason)
        assert_close(ours.logprobs, theirs.logprobs)
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
    engines: Engines, prompt: list[int], ours: list[int], theirs: list[int], params: SamplingParams, index: int
) -> None:
    """The first token that differs must have been a tie in the reference, as near as rounding can tell."""
    position = next(i for i, (a, b) in enumerate(itertools.zip_longest(ours, theirs)) if a != b)
    logits = reference_model(engines.folder)(torch.tensor([prompt + theirs[:position]])).logits[0, -1].float()
    plain = SamplingParams(max_tokens=params.max_tokens)
    simple = all(
        getattr(params, name) == getattr(plain, name)
        for name in (
            "repetition_penalty",
            "frequency_penalty",
            "presence_penalty",
            "logit_bias",
            "top_p",
            "top_k",
            "min_p",
        )
    )
    assert simple, f"tokens differ at {position}: {ours} and {theirs}, with {params}"
    if not params.greedy:
        seed = (
            derive_seed(derive_seed(params.seed or 0, 0), index) if params.n > 1 else derive_seed(params.seed or 0, 0)
        )
        keys = draw_keys(np.array([seed], dtype=np.uint64), np.array([len(prompt) + position]))
        noise = log_exponential(token_hashes(VOCAB_SIZE, torch.device("cpu")), torch.from_numpy(keys))[0]
        logits = logits / params.temperature - noise
    gap = float((logits[ours[position]] - logits[theirs[position]]).abs())
    assert gap < MARGIN, f"tokens differ at {position} by {gap:.2g}: {ours} and {theirs}, with {params}"
    engines.num_ties += 1
