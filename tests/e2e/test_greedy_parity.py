"""Greedy tokens of the whole engine equal those of transformers, for every family and configuration, however scheduled."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inflight import LLM, SamplingParams
from inflight.engine.start.kv_cache_sizing import blocks_per_sequence
from tests.conftest import FULL
from tests.e2e.greedy_truth import Comparison
from tests.support.model_zoo import FAMILY_CONFIGS, VOCAB_SIZE, reference_model, write_model

CASES = [(family, index) for family, configs in FAMILY_CONFIGS.items() for index in range(len(configs))]
PROMPT_LENGTHS = (1, 2, 15, 16, 17, 48, 130, 333, 700)
OUTPUT_LENGTH = 64 if FULL else 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LENGTH, ignore_eos=True)

MAX_MODEL_LEN, MAX_STEP_TOKENS = 800, 64

# name -> engine arguments; "preempted" has a KV cache just large enough for one sequence
MODES: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunked": {"max_num_batched_tokens": MAX_STEP_TOKENS, "max_num_seqs": 9},
    "unchunked": {"enable_chunked_prefill": False},
    "preempted": {"max_num_batched_tokens": MAX_STEP_TOKENS, "max_num_seqs": 9},
}


def modes_of(index: int) -> list[str]:
    """`make test` has "preempted" for every configuration: it cuts prompts into the chunks of "chunked", and also computes
    sequences again. For the first configuration of a family it has those modes, too, that compute a prompt whole. They differ
    from it in the scheduler, and in the attention over a whole prompt, which test_model_parity.py compares for every
    configuration."""
    if FULL:
        return list(MODES)
    return ["batched", "unchunked", "preempted"] if index == 0 else ["preempted"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    return tmp_path_factory.mktemp("greedy")


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in PROMPT_LENGTHS]


def one_sequence_bytes(folder: Path) -> int:
    """The smallest KV cache that the engine accepts."""
    with make(folder, 1 << 25) as llm:
        config = llm.llm_engine.core.kv_cache_config
    blocks = blocks_per_sequence(config.groups, num_tokens=MAX_MODEL_LEN, max_step_tokens=MAX_STEP_TOKENS)
    return (1 + blocks) * config.block_bytes


def make(folder: Path, memory: int, **arguments: Any) -> LLM:
    fixed: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": MAX_MODEL_LEN, "dtype": "float32"}
    return LLM(str(folder), kv_cache_memory_bytes=memory, **fixed, **arguments)


@pytest.mark.parametrize(("family", "index"), CASES)
def test_tokens_equal_those_of_transformers(root: Path, family: str, index: int) -> None:
    folder = write_model(FAMILY_CONFIGS[family][index], root / f"{family}-{index}", seed=index)
    truth, comparison = reference_model(folder), Comparison()
    known: dict[tuple[int, ...], list[int]] = {}  # prompt -> an output that has been compared
    for mode, arguments in ((mode, MODES[mode]) for mode in modes_of(index)):
        memory = one_sequence_bytes(folder) if mode == "preempted" else 1 << 25
        with make(folder, memory, **arguments) as llm:
            outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)
            again = llm.generate(prompts(), GREEDY, use_tqdm=False)  # now from the prefix cache
            for output in outputs + again:
                prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
                assert len(tokens) == OUTPUT_LENGTH
                if known.get(tuple(prompt)) != tokens:
                    comparison.add(truth, prompt, tokens)
                    known[tuple(prompt)] = tokens
            scheduler = llm.llm_engine.core.scheduler
            if mode == "batched":
                assert again[-1].num_cached_tokens >= 660  # of 700; blocks of recurrent models are longer
            if mode == "preempted" and None in {
                g.spec.sliding_window for g in llm.llm_engine.core.kv_cache_config.groups
            }:
                assert scheduler.stats.num_preemptions > 0
            scheduler.check_integrity()
    print(f"{family} {index}: {comparison}")
