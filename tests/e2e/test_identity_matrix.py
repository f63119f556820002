"""Every feature on or off, in every combination: the tokens are those of the request alone in a plain engine.

An example draws an engine (steps planned ahead or not, prefix cache, chunked prefill, KV cache large or so small that
requests are preempted, slots), requests (shared beginnings, n > 1, greedy and sampled, penalties, stop conditions,
log-probabilities) and a schedule (arrivals between steps, aborts). `make test` runs a few, which are others for each model, and
`make test-full` 1,000 for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import FULL
from tests.e2e.identity import Engines, Event, Features, compare, examples, make_params, run_example, run_schedule
from tests.support.model_zoo import FALLBACK_CONFIGS, FAMILY_CONFIGS, VOCAB_SIZE, write_model

NUM_EXAMPLES = 1000 if FULL else 5
NUM_SLOW_EXAMPLES = 1000 if FULL else 3  # of models that transformers computes: a step takes ten times as long
MAX_TOKENS = 12
# (family, configuration, block size): head_dim 16 in blocks of 16 goes to the C++ attention kernel, others to plain torch
MODELS = {
    "full attention": ("llama", 1, 4),
    "full attention, C++": ("llama", 0, 16),
    "mixed windows": ("qwen3", 4, 4),
    "mixed windows, C++": ("qwen3", 4, 16),
    "soft caps, C++": ("gemma2", 0, 16),
    "two rotary embeddings, C++": ("gemma3", 0, 16),
    "shared caches, heads of two sizes, C++": ("gemma4", 0, 16),
    "shared caches, heads of two sizes": ("gemma4", 0, 4),
    "recurrent layers, C++": ("qwen3_5", 0, 16),
    "recurrent layers": ("qwen3_5", 2, 4),
    "short convolutions, C++": ("lfm2", 0, 16),
    "short convolutions": ("lfm2", 2, 4),
    "latent attention, C++": ("deepseek_v2", 1, 16),
    "latent attention": ("deepseek_v2", 2, 4),
    "experts, C++": ("qwen3_moe", 0, 16),
    "a shared expert": ("qwen2_moe", 1, 4),
    "sinks, experts with biases, C++": ("gpt_oss", 0, 16),
    "recurrent layers and experts, C++": ("qwen3_5_moe", 0, 16),
    "experts beside the MLP, C++": ("gemma4", 3, 16),
    "norms after the rotation, C++": ("hunyuan_v1_moe", 0, 16),
    "groups of experts, C++": ("deepseek_v3", 2, 16),
    "transformers, experts": ("dots1", 0, 16),
    "transformers, recurrent layers": ("falcon_h1", 0, 16),
}


FEATURES = st.builds(
    Features,
    caching=st.booleans(),
    chunk=st.sampled_from([None, 5, 16]),
    tight=st.booleans(),
    max_num_seqs=st.sampled_from([2, 5]),
    num_drafts=st.sampled_from([0, 3]),
    draft_method=st.sampled_from(["ngram", "suffix"]),
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


@pytest.fixture(scope="module", params=MODELS)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    family, index, block_size = MODELS[request.param]
    folder = write_model(
        {**FALLBACK_CONFIGS, **FAMILY_CONFIGS}[family][index], tmp_path_factory.mktemp("identity") / "model", seed=1
    )
    found = Engines(folder, block_size)
    yield found
    print(f"{request.param}: {found.num_tokens} tokens, {found.num_ties} ties, {len(found.llms)} engines")
    found.close()


def test_tokens_do_not_depend_on_features_or_company(engines: Engines, request: pytest.FixtureRequest) -> None:
    is_slow = "transformers" in request.node.name

    @examples(NUM_SLOW_EXAMPLES if is_slow else NUM_EXAMPLES, request.node.name)
    @given(features=FEATURES, plans_ahead=st.booleans(), events=EVENTS)
    def check(features: Features, plans_ahead: bool, events: list[Event]) -> None:
        run_example(engines, replace(features, plans_ahead=plans_ahead), events)

    check()


def test_the_next_message_of_a_chat_goes_on_from_the_answer(engines: Engines, request: pytest.FixtureRequest) -> None:
    index = list(MODELS).index(request.node.callspec.params["engines"])
    for num_drafts in (0, 3) if FULL else (0, 3)[index % 2 :][:1]:  # in `make test` with drafts for every other model
        check_next_messages(engines, num_drafts)


def check_next_messages(engines: Engines, num_drafts: int) -> None:
    features = Features(caching=True, chunk=None, tight=False, max_num_seqs=2, num_drafts=num_drafts)
    engine, size = engines.llm(features).llm_engine, engines.block_size
    engine.core.reset_prefix_cache()
    params = make_params({"max_tokens": 20, "temperature": 0.0, "ignore_eos": True}, seed=0)
    said: list[int] = []
    for message in ([5, 9, 4, 7, 6, 3, 8], [11, 3, 5], [7, 6]):
        prompt = said + message
        output = run_schedule(engine, [(prompt, {}, 0, False)], [params])[0]
        compare(engines, output, engines.plain(prompt, params), params)
        assert output.num_cached_tokens >= max(0, len(said) - 1) // size * size  # the last token was not computed
        said = prompt + output.outputs[0].token_ids
