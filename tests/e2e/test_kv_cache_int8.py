"""An int8 KV cache: tokens depend neither on chunks, nor on what comes from the prefix cache, preemptions, or ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from inflight import LLM, SamplingParams
from inflight.errors import ConfigError
from tests.e2e.identity import PLAIN, Engines, Features
from tests.support.instruction_sets import INSTRUCTION_SETS_HERE
from tests.support.model_zoo import FAMILY_CONFIGS, VOCAB_SIZE, write_model

pytestmark = pytest.mark.skipif(not INSTRUCTION_SETS_HERE, reason="the C++ kernels are not here")

SERVED = Features(caching=False, chunk=None, tight=False, max_num_seqs=5)
VARIANTS = {
    "batched": SERVED,
    "chunked": replace(SERVED, chunk=5),
    "from the prefix cache": replace(SERVED, caching=True),
    "preempted": replace(SERVED, tight=True, chunk=16, plans_ahead=True),
    "two ranks a layer": replace(SERVED, tensor_parallel_size=2),
    "two stages": replace(SERVED, pipeline_parallel_size=2),
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def _prompts() -> list[list[int]]:
    """Some of them share a beginning of two blocks."""
    random = np.random.default_rng(0)
    beginning = random.integers(3, VOCAB_SIZE, 32).tolist()
    ends = [random.integers(3, VOCAB_SIZE, size).tolist() for size in (1, 20, 33, 50, 7, 17)]
    return [(beginning if i % 2 else []) + end for i, end in enumerate(ends)]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = write_model(FAMILY_CONFIGS["llama"][0], tmp_path_factory.mktemp("int8") / "model", seed=1)
    shared = {"skip_tokenizer_init": True, "kv_cache_dtype": "int8"}
    found = Engines(folder, 16, arguments={"distributed_executor_backend": "uni"}, shared=shared)
    yield found
    found.close()


@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_are_those_of_each_prompt_alone(engines: Engines, variant: str) -> None:
    truth = [engines.plain(prompt, GREEDY).outputs[0].token_ids for prompt in _prompts()]
    engines.close(but=PLAIN)
    llm = engines.llm(VARIANTS[variant])
    for _ in range(2):  # the second time over a filled prefix cache
        outputs = llm.generate(_prompts(), GREEDY, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == truth


def test_a_block_has_fewer_bytes_and_numbers_differ_a_little(engines: Engines) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=0, ignore_eos=True)
    prompt = _prompts()[3]
    with_int8 = engines.llm(PLAIN).generate([prompt], params, use_tqdm=False)[0].outputs[0]
    (specs,) = engines.llm(PLAIN).llm_engine.executor.get_kv_cache_specs()
    for spec in specs.values():
        assert spec.block_bytes == 16 * 2 * spec.num_kv_heads * (spec.head_dim + 4)
    with LLM(
        str(engines.folder), dtype="float32", block_size=16, max_model_len=96, kv_cache_memory_bytes=1 << 21,
        generation_config="none", num_threads=1, skip_tokenizer_init=True,
    ) as llm:  # fmt: skip
        plain = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]
    assert with_int8.token_ids == plain.token_ids
    assert with_int8.cumulative_logprob is not None and plain.cumulative_logprob is not None
    assert 0 < abs(with_int8.cumulative_logprob - plain.cumulative_logprob) < 0.5


def test_a_block_size_that_the_kernel_does_not_serve_is_refused(engines: Engines) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype='int8' needs"):
        LLM(
            str(engines.folder),
            dtype="float32",
            block_size=4,
            kv_cache_dtype="int8",
            max_model_len=96,
            kv_cache_memory_bytes=1 << 21,
            skip_tokenizer_init=True,
        )
