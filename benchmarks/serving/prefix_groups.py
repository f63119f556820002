"""Groups of requests with the same beginning over two replicas: routing by prefix against routing by load, in turns.

    python -m benchmarks.prefix_groups [--rounds 5]

Requests of a group share a prompt that is in the prefix cache of one replica: rollouts of one prompt, or users of one system
prompt. To send them all there saves their prompts, and leaves the other replica idle. Each case is the time until the last
answer of the group has ended, of the embedded model with one thread a replica; two cores must be free. Goal: `prefix` is not
slower than `load` in any case, 0.97 times its speed or more.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.shared.in_turns import compare_in_turns
from benchmarks.shared.report import print_table
from inflight import LLM, SamplingParams
from inflight.engine.request.prompt import TokensPrompt

GOAL = 0.97
VOCABULARY = range(300, 1500)


@dataclass(frozen=True)
class Group:
    """`size` requests share `num_tokens` tokens of the prompt and have `own_tokens` more. An answer has `output` tokens."""

    name: str
    size: int
    num_tokens: int
    own_tokens: int
    output: int


GROUPS = (
    Group("16 rollouts of one prompt of 600", 16, 600, 0, 300),
    Group("32 users of a system prompt of 1500", 32, 1500, 40, 60),
    Group("16 users of a system prompt of 1500", 16, 1500, 40, 60),
    Group("24 users of a system prompt of 400", 24, 400, 40, 60),
)


def make(routing: str) -> LLM:
    fields: dict[str, Any] = {"num_threads": 1, "seed": 0, "max_num_seqs": 64, "kv_cache_memory_bytes": 1 << 28}
    return LLM(data_parallel_size=2, data_parallel_routing=routing, **fields)


def tokens_per_second(llm: LLM, group: Group, draws: random.Random) -> float:
    def some(count: int) -> list[int]:
        return [draws.choice(VOCABULARY) for _ in range(count)]

    shared = some(group.num_tokens)
    prompts = [TokensPrompt(prompt_token_ids=shared + some(group.own_tokens)) for _ in range(group.size)]
    params = SamplingParams(temperature=1.0, max_tokens=group.output, ignore_eos=True)
    llm.generate(
        TokensPrompt(prompt_token_ids=shared), SamplingParams(max_tokens=1), use_tqdm=False
    )  # one replica has it now
    begin = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return group.size * group.output / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    draws = random.Random(0)
    with make("load") as by_load, make("prefix") as by_prefix:
        rows = [
            compare_in_turns(
                "prefix_groups",
                group.name,
                lambda group=group: tokens_per_second(by_load, group, draws),  # type: ignore[misc]
                lambda group=group: tokens_per_second(by_prefix, group, draws),  # type: ignore[misc]
                options.rounds,
            )
            for group in GROUPS
        ]
    print_table(["tokens/s", "load", "prefix", f"prefix / load, goal {GOAL}"], rows)


if __name__ == "__main__":
    main()
