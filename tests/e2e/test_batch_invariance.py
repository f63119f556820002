"""`batch_invariant=True`: tokens, log-probabilities and those of the prompt are bit for bit those of the request alone.

32 prompts of 1 to 300 tokens, one of them of 1,200, run alone, one after the other in one engine, whole and on one thread; then
all at once in engines that differ in what must not matter: token budget (so prompts are cut elsewhere), slots, blocks (so few
that requests are preempted), prefix cache, and threads. Floats are compared as they are, without tolerance.
"""

from __future__ import annotations

import copy
import itertools
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight import LLM, RequestOutput, SamplingParams
from inflight.scheduler.request import Request
from inflight.scheduler.scheduler import Scheduler
from tests.support.instruction_sets import INSTRUCTION_SETS_HERE
from tests.support.model_zoo import FAMILY_CONFIGS, VOCAB_SIZE, write_model

NUM_BATCHINGS = 20 if os.environ.get("INFLIGHT_TEST_FULL") == "1" else 3
NUM_PROMPTS, MAX_PROMPT, MAX_TOKENS = 32, 300, 16
LONG_PROMPT = 1200  # past the 1,024 keys after which attention is split
MAX_MODEL_LEN = 1232
NUM_LAYERS, NUM_VECTORS = 2, 16 * 2 * 2  # in a layer's block: 16 tokens, keys and values, 2 heads
# Of each family: head_dim 16, so that the C++ attention serves it, and sums long enough to be split.
MODELS = ["llama", "qwen3"]
WIDE = {
    "max_position_embeddings": 2048,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "head_dim": 16,
}


@dataclass(frozen=True)
class Batching:
    """What may differ between two runs. `num_blocks` None: room for all; `seed` shuffles the order of arrival."""

    max_num_batched_tokens: int
    max_num_seqs: int
    num_blocks: int | None
    enable_prefix_caching: bool
    num_threads: int
    seed: int

    def arguments(self, vector_bytes: int) -> dict[str, Any]:
        num_blocks = self.num_blocks or NUM_PROMPTS * MAX_MODEL_LEN // 16 + 1
        return {
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": min(self.max_num_seqs, self.max_num_batched_tokens),
            "kv_cache_memory_bytes": num_blocks * NUM_LAYERS * NUM_VECTORS * vector_bytes,
            "enable_prefix_caching": self.enable_prefix_caching,
            "num_threads": self.num_threads,
        }


ALONE = Batching(512, 1, None, False, 1, seed=0)
# the first one after another cover every value that is not the plain one's, the rest is drawn
CHOSEN = [
    Batching(2048, 32, None, False, 2, seed=1),
    Batching(61, 7, 80, False, 1, seed=2),
    Batching(256, 32, 84, True, 2, seed=3),
]


def drawn(seed: int) -> Batching:
    draw = random.Random(seed)
    return Batching(
        max_num_batched_tokens=draw.choice([17, 32, 61, 100, 256, 777, 4096]),
        max_num_seqs=draw.choice([2, 5, 11, 32]),
        num_blocks=draw.choice([None, 80, 100, 140]),
        enable_prefix_caching=draw.random() < 0.5,
        num_threads=draw.choice([1, 2]),
        seed=seed,
    )


def make_prompts() -> list[list[int]]:
    """Half of them begin alike, so that the prefix cache has something to do."""
    draw = random.Random(0)
    shared = [draw.randrange(3, VOCAB_SIZE) for _ in range(LONG_PROMPT)]
    lengths = [1, 2, 15, 16, 17, LONG_PROMPT, MAX_PROMPT] + [
        draw.randint(1, MAX_PROMPT) for _ in range(NUM_PROMPTS - 7)
    ]
    prompts = []
    for i, length in enumerate(lengths):
        own = [draw.randrange(3, VOCAB_SIZE) for _ in range(length)]
        kept = length // 2 if i % 2 else 0
        prompts.append(shared[:kept] + own[kept:])
    return prompts


def params_of(i: int) -> SamplingParams:
    """Greedy and sampled in turn; a sampled token shows a difference that greedy ones may hide."""
    return SamplingParams(
        temperature=0.0 if i % 2 else 1.0,
        seed=i,
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
        logprobs=5,
        prompt_logprobs=2 if i % 4 == 0 else None,
    )


Bits = tuple[tuple[int, ...], list[Any], list[Any]]


def bits(output: RequestOutput) -> Bits:
    """All that must be equal; floats as hexadecimal text, so that a failure shows them whole."""
    completion = output.outputs[0]

    def exact(rows: Any) -> list[Any]:
        return [
            row and [(token, entry.logprob.hex(), entry.rank) for token, entry in row.items()] for row in rows or []
        ]

    return tuple(completion.token_ids), exact(completion.logprobs), exact(output.prompt_logprobs)


def run(folder: Path, batching: Batching, vector_bytes: int, **arguments: Any) -> list[Bits]:
    prompts = make_prompts()
    order = list(range(NUM_PROMPTS))
    random.Random(batching.seed).shuffle(order)
    with LLM(
        str(folder),
        skip_tokenizer_init=True,
        generation_config="none",
        max_model_len=MAX_MODEL_LEN,
        **batching.arguments(vector_bytes),
        **arguments,
    ) as llm:
        outputs = llm.generate([prompts[i] for i in order], [params_of(i) for i in order], use_tqdm=False)
    return [bits(outputs[order.index(i)]) for i in range(NUM_PROMPTS)]


FORMATS: dict[str, tuple[int, dict[str, Any]]] = {  # bytes of a head's key (head_dim is 16), arguments
    "bfloat16": (32, {}),
    "int8": (20, {"quantization": "int8", "kv_cache_dtype": "int8"}),
    "int4": (32, {"quantization": "int4"}),
    "float32": (64, {"dtype": "float32"}),
}
CASES = [*itertools.product(MODELS, ["bfloat16", "int8"]), ("qwen3", "int4"), ("llama", "float32")]


@pytest.mark.skipif(not INSTRUCTION_SETS_HERE, reason="no C++ kernels here")
@pytest.mark.parametrize(("family", "form"), CASES)
def test_bits_do_not_depend_on_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, form: str
) -> None:
    preempted, preempt = list[Request](), Scheduler._requeue
    monkeypatch.setattr(
        Scheduler, "_requeue", lambda self, request: (preempted.append(request), preempt(self, request))
    )
    config = copy.deepcopy(FAMILY_CONFIGS[family][0])
    config.update(WIDE)
    folder = write_model(config, tmp_path / "model", seed=0, dtype=torch.bfloat16)
    vector_bytes, changes = FORMATS[form]
    arguments = {"dtype": "bfloat16", "batch_invariant": True, **changes}
    alone = run(folder, ALONE, vector_bytes, **arguments)
    batchings = [*CHOSEN, *map(drawn, range(NUM_BATCHINGS - len(CHOSEN)))]
    for batching in batchings:
        for i, (found, expected) in enumerate(
            zip(run(folder, batching, vector_bytes, **arguments), alone, strict=True)
        ):
            assert found == expected, f"prompt {i} of {batching}"
    assert preempted, "the small caches are meant to be too small"


@pytest.mark.skipif(not INSTRUCTION_SETS_HERE, reason="no C++ kernels here")
def test_bits_do_not_depend_on_the_batch_with_four_ranks(tmp_path: Path) -> None:
    """Four partial sums can be added up in different orders, with different results."""
    config = copy.deepcopy(FAMILY_CONFIGS["llama"][0])
    config.update(WIDE)
    folder = write_model(config, tmp_path / "model", seed=0, dtype=torch.bfloat16)
    arguments = {
        "dtype": "bfloat16",
        "batch_invariant": True,
        "tensor_parallel_size": 4,
        "distributed_executor_backend": "mp",
    }
    assert run(folder, CHOSEN[0], 32, **arguments) == run(folder, ALONE, 32, **arguments)
