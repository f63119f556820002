"""What n-gram proposals cost a step: with an index of each long sequence, and with a search through all of it.

    python -m benchmarks.ngram_proposer [--length 131072] [--rows 16 256] [--steps 50]

Tokens are drawn from a Zipf distribution, like those of real texts. Each step adds one token to every sequence. "First" is the
step that makes the index.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from benchmarks.shared.report import emit, print_table
from inflight.config.speculative import SpeculativeConfig
from inflight.interface.request import Int32Array
from inflight.spec_decode import sequence_index
from inflight.spec_decode.ngram import NgramProposer

CONFIG = SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_min=2, prompt_lookup_max=4)


def step_milliseconds(token_ids: Int32Array, length: int, num_steps: int) -> tuple[float, float, list[Int32Array]]:
    """(time of the first step, median time of the others, the proposals)."""
    proposer, slots = NgramProposer(CONFIG, "cpu"), np.arange(len(token_ids), dtype=np.int32)
    times, proposed = [], []
    for step in range(num_steps):
        num_tokens = np.full(len(slots), length + step, dtype=np.int32)
        start = time.perf_counter()
        proposed.append(proposer.propose(token_ids, slots, num_tokens))
        times.append((time.perf_counter() - start) * 1e3)
    return times[0], statistics.median(times[1:]), proposed


def main() -> None:
    parser = argparse.ArgumentParser(description="What n-gram proposals cost a step.")
    parser.add_argument("--length", type=int, default=131072, help="tokens of a sequence [%(default)s]")
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 256], help="sequences [16 256]")
    parser.add_argument("--steps", type=int, default=50, help="[%(default)s]")
    args = parser.parse_args()
    table: list[list[object]] = []
    for num_rows in args.rows:
        generator = np.random.default_rng(0)
        tokens = generator.zipf(1.2, (num_rows, args.length + args.steps + 8))
        token_ids = np.minimum(tokens, 150_000).astype(np.int32)
        first, indexed, proposed = step_milliseconds(token_ids, args.length, args.steps)
        least, sequence_index.MIN_INDEXED = sequence_index.MIN_INDEXED, 2**31
        _, passes, same = step_milliseconds(token_ids, args.length, args.steps)
        sequence_index.MIN_INDEXED = least
        assert all(np.array_equal(a, b) for a, b in zip(proposed, same, strict=True)), "the proposals differ"
        row = {"pass_ms": round(passes, 2), "index_ms": round(indexed, 2), "first_ms": round(first, 1)}
        emit(benchmark="ngram_proposer", rows=num_rows, length=args.length, **row)
        table.append([num_rows, args.length, *row.values()])
    print_table(["sequences", "tokens", "pass, ms", "index, ms", "first, ms"], table)


if __name__ == "__main__":
    main()
