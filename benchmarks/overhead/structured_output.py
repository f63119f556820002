"""What a grammar costs: time to compile it, and time per row to fill a mask, alone and as part of a batch.

    python -m benchmarks.structured_output [--tokenizer FOLDER] [--vocab-size N] [--rows 32 256]

The masks are those along texts drawn from them at random. `batch` is one call for all rows of a step, divided by the rows.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import numpy as np

from benchmarks.shared.report import emit, percentile, print_table
from inflight.errors import InvalidRequestError
from inflight.structured_output.backend import CompiledGrammar, GrammarBackend, GrammarMatcher, MaskJob, num_mask_words
from inflight.structured_output.llguidance_backend import LLGuidanceBackend
from inflight.structured_output.spec import GrammarSpec
from inflight.structured_outputs_params import StructuredOutputsParams
from inflight.tokenizer.folder_tokenizer import folder_tokenizer
from inflight.tokenizer.tokenizer import Tokenizer

MODEL = Path(__file__).resolve().parents[2] / "inflight" / "demo" / "model"
NUM_TEXTS = 8
MAX_TOKENS = 60

_ITEM = {
    "type": "object",
    "properties": {"sku": {"enum": ["a1", "b2", "c3"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["sku", "count"],
    "additionalProperties": False,
}
_ORDER = {
    "type": "object",
    "properties": {"id": {"type": "integer"}, "note": {"type": "string"}, "items": {"type": "array", "items": _ITEM}},
    "required": ["id", "note", "items"],
    "additionalProperties": False,
}
GRAMMARS = {
    "json order": StructuredOutputsParams(json=_ORDER, disable_any_whitespace=True),
    "json strings of 1 to 40": StructuredOutputsParams(
        json={"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 40}, "maxItems": 8}
    ),
    "any JSON object": StructuredOutputsParams(json_object=True),
    "regex": StructuredOutputsParams(regex=r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}(:\d{2})?Z? [a-z ]{1,80}"),
    "choice of 1000": StructuredOutputsParams(choice=[f"choice number {i * 7919 % 100_003}" for i in range(1000)]),
}


def walk_masks(matcher: GrammarMatcher, num_words: int, rng: random.Random) -> list[float]:
    """Microseconds of each mask along one random text."""
    times: list[float] = []
    row = np.empty(num_words, dtype=np.int32)
    while len(times) < MAX_TOKENS and not matcher.is_terminated():
        start = time.perf_counter()
        matcher.fill_mask(row)
        times.append((time.perf_counter() - start) * 1e6)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        matcher.accept(int(rng.choice(allowed)))
    return times


def batch_time(backend: GrammarBackend, compiled: CompiledGrammar, num_rows: int) -> float:
    """Microseconds per row of one call for `num_rows` requests; the best of three."""
    jobs = [MaskJob(compiled.matcher(), i) for i in range(num_rows)]
    rows = np.empty((num_rows, num_mask_words(backend.vocab_size)), dtype=np.int32)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        backend.fill_masks(jobs, rows)
        times.append((time.perf_counter() - start) * 1e6)
    return min(times) / num_rows


def measure(tokenizer: Tokenizer, vocab_size: int, num_rows: list[int]) -> list[list[object]]:
    start = time.perf_counter()
    eos = tokenizer.eos_token_id
    backend = LLGuidanceBackend(tokenizer, vocab_size, [] if eos is None else [eos])
    emit(benchmark="structured_output", vocab_size=vocab_size, start_ms=(time.perf_counter() - start) * 1e3)
    table: list[list[object]] = []
    for label, params in GRAMMARS.items():
        start = time.perf_counter()
        try:
            compiled = backend.compile(GrammarSpec.from_params(params))
        except InvalidRequestError as error:
            table.append([label, f"refused: {error}", *[""] * (2 + len(num_rows))])
            continue
        compile_ms = (time.perf_counter() - start) * 1e3
        rng = random.Random(0)
        times = [
            value for _ in range(NUM_TEXTS) for value in walk_masks(compiled.matcher(), num_mask_words(vocab_size), rng)
        ]
        p50, p99 = percentile(times, 0.5), percentile(times, 0.99)
        batch = {rows: batch_time(backend, compiled, rows) for rows in num_rows}
        emit(
            benchmark="structured_output", grammar=label, compile_ms=compile_ms, p50_us=p50, p99_us=p99,
            batch_us_per_row=batch,
        )  # fmt: skip
        cells = [f"{compile_ms:.1f}", f"{p50:.1f}", f"{p99:.1f}", *(f"{value:.1f}" for value in batch.values())]
        table.append([label, *cells])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile and mask times of structured outputs.")
    parser.add_argument("--tokenizer", type=Path, default=MODEL, help="folder of a tokenizer.json [the embedded model]")
    parser.add_argument("--vocab-size", type=int, help="of the model [the tokenizer's]")
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 256], help="requests in a step [32 256]")
    args = parser.parse_args()
    tokenizer = folder_tokenizer(args.tokenizer)
    vocab_size = args.vocab_size or tokenizer.vocab_size
    header = ["grammar", "compile ms", "mask p50 us", "p99 us", *(f"batch {rows} us/row" for rows in args.rows)]
    print_table(header, measure(tokenizer, vocab_size, args.rows))


if __name__ == "__main__":
    main()
