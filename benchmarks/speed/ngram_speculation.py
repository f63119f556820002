"""N-gram speculation at batch 1: two engines of one model, with drafts and without, in turns; the tokens must be equal.

    python -m benchmarks.ngram_speculation [--model qwen3-0.6b] [--drafts 4] [--rounds 3] [--count 4] [--tokens 96]

A shape with random weights continues random prompts; greedy, it soon repeats itself. The embedded model, the default, answers
held-out prompts: asked once, what can be copied are values out of the prompt; asked again in one conversation, all of the first
answer can. Medians of the rounds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.shared.models import SHAPES, add_model_arguments, model_folder
from benchmarks.shared.report import emit, print_table
from inflight import LLM, SamplingParams
from scripts.demo.evaluate import held_out_samples

EMBEDDED_MODEL = Path(__file__).resolve().parents[2] / "inflight" / "demo" / "model"
PROMPT_TOKENS = 64
ASKED = (("extraction", 1), ("extraction", 2), ("stories", 1), ("stories", 2))  # kind, times


@dataclass
class Run:
    """A set of prompts, answered one after the other."""

    token_ids: list[list[int]]
    tokens_per_second: float
    num_draft_tokens: int
    num_accepted_tokens: int

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))


def random_prompts(count: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(300, 1500) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def chat_prompts(llm: LLM, kind: str, times: int, count: int) -> list[list[int]]:
    return [
        llm.llm_engine.render_chat([*[*sample.messages, sample.answer] * (times - 1), *sample.messages])
        for sample in held_out_samples(kind, count)
    ]


def run(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> Run:
    stats = llm.llm_engine.core.scheduler.stats
    tried, accepted = stats.num_draft_tokens, stats.num_accepted_tokens
    start = time.perf_counter()
    outputs = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
    seconds = time.perf_counter() - start
    token_ids = [output.outputs[0].token_ids for output in outputs]
    return Run(
        token_ids,
        sum(map(len, token_ids)) / seconds,
        stats.num_draft_tokens - tried,
        stats.num_accepted_tokens - accepted,
    )


def compare(
    engines: tuple[LLM, LLM], name: str, prompts: Sequence[list[int]], params: SamplingParams, rounds: int
) -> list[str]:
    """A row of the table. `engines`: without drafts, and with."""
    runs: tuple[list[Run], list[Run]] = ([], [])
    for index in range(rounds + 1):  # the first is a warm-up
        for which in (0, 1) if index % 2 else (1, 0):
            runs[which].append(run(engines[which], prompts, params))
    assert all(each.token_ids == runs[0][0].token_ids for found in runs for each in found), "drafts changed a token"
    free, drafted = (statistics.median(each.tokens_per_second for each in found[1:]) for found in runs)
    last = runs[1][-1]
    acceptance = last.num_accepted_tokens / max(last.num_draft_tokens, 1)
    share = last.num_accepted_tokens / last.num_tokens
    emit(benchmark="ngram_speculation", prompts=name, tokens=last.num_tokens, acceptance=round(acceptance, 3),
         accepted_share=round(share, 3), free=round(free, 1), drafted=round(drafted, 1), ratio=round(drafted / free, 2),
    )  # fmt: skip
    cells = [f"{acceptance:.0%}", f"{share:.0%}", f"{free:.1f}", f"{drafted:.1f}", f"{drafted / free:.2f}"]
    return [name, str(last.num_tokens), *cells]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser, default=str(EMBEDDED_MODEL))
    parser.add_argument("--drafts", type=int, default=4, help="at most, of a step [%(default)s]")
    parser.add_argument("--rounds", type=int, default=3, help="[%(default)s]")
    parser.add_argument("--count", type=int, default=4, help="prompts of each kind [%(default)s]")
    parser.add_argument("--tokens", type=int, default=96, help="that follow a random prompt [%(default)s]")
    parser.add_argument("--dtype", default="auto", help="[%(default)s]")
    options = parser.parse_args()
    ngram = {"method": "ngram", "num_speculative_tokens": options.drafts}
    off, on = [
        LLM(
            str(model_folder(options.model, options.models)),
            dtype=options.dtype,
            speculative_config=config,
            enable_prefix_caching=False,
            max_model_len=1024,
            kv_cache_memory_bytes=1 << 28,
            seed=0,
        )
        for config in (None, ngram)
    ]
    if options.model in SHAPES:
        params = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True)
        rows = [compare((off, on), "random", random_prompts(options.count), params, options.rounds)]
    else:
        params = SamplingParams(temperature=0.0, max_tokens=512)
        rows = []
        for kind, times in ASKED:
            prompts = chat_prompts(off, kind, times, options.count)
            name = kind if times == 1 else f"{kind}, again"
            rows.append(compare((off, on), name, prompts, params, options.rounds))
    off.close()
    on.close()
    print_table(["prompts", "tokens", "drafts accepted", "of tokens", "tokens/s", "with drafts", "ratio"], rows)


if __name__ == "__main__":
    main()
