"""Decoding under a grammar against decoding freely: one engine, the two in turns, tokens per second.

    python -m benchmarks.structured_throughput [--model qwen3-0.6b] [--batch 32] [--rounds 5] [--grammars strings objects]

The grammars never end, so that all runs have the same number of tokens. Under "strings" nearly every token is drawn; under
"objects" many are forced, and cost a share of a step only. Medians; the bar for "strings" on a
real shape is 0.95 of the free speed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

from benchmarks.shared.models import SHAPES, add_model_arguments, model_folder
from benchmarks.shared.report import emit, print_table, verdict
from inflight import LLM, SamplingParams
from inflight.structured_outputs_params import StructuredOutputsParams

EMBEDDED_MODEL = Path(__file__).resolve().parents[2] / "inflight" / "demo" / "model"
PROMPT_TOKENS = 8
BAR = 0.95

_ITEM = {
    "type": "object",
    "properties": {
        "sku": {"type": "string", "minLength": 4},
        "count": {"type": "integer"},
        "gift": {"type": "boolean"},
    },
    "required": ["sku", "count", "gift"],
    "additionalProperties": False,
}
CONSTRAINTS: dict[str, StructuredOutputsParams | None] = {
    "free": None,
    "strings": StructuredOutputsParams(json={"type": "array", "items": {"type": "string"}, "minItems": 1000}),
    "objects": StructuredOutputsParams(
        json={"type": "array", "items": _ITEM, "minItems": 1000}, disable_any_whitespace=True
    ),
}


def params_for(constraint: StructuredOutputsParams | None, num_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=1.0, seed=0, max_tokens=num_tokens, structured_outputs=constraint, ignore_eos=constraint is None
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser, default=str(EMBEDDED_MODEL))
    parser.add_argument("--batch", type=int, default=32, help="requests at a time [%(default)s]")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each [%(default)s]")
    parser.add_argument("--rounds", type=int, default=5, help="[%(default)s]")
    parser.add_argument(
        "--grammars", nargs="+", choices=list(CONSTRAINTS)[1:], default=["strings"], help="[%(default)s]"
    )
    options = parser.parse_args()
    llm = LLM(
        str(model_folder(options.model, options.models)),
        enable_prefix_caching=False,
        max_model_len=1024,
        kv_cache_memory_bytes=1 << 30,
    )
    rng = random.Random(0)
    prompts = [[rng.randrange(300, 1500) for _ in range(PROMPT_TOKENS)] for _ in range(options.batch)]
    stats = llm.llm_engine.core.scheduler.stats
    names = ["free", *options.grammars]
    speeds: dict[str, list[float]] = {name: [] for name in names}
    forced = dict.fromkeys(names, 0.0)
    for index in range(options.rounds + 1):  # the first is a warm-up: it compiles the grammars
        for name in names if index % 2 else reversed(names):
            before = stats.num_forced_tokens
            start = time.perf_counter()
            outputs = llm.generate(prompts, params_for(CONSTRAINTS[name], options.tokens), use_tqdm=False)
            seconds = time.perf_counter() - start
            num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            assert num_tokens == options.batch * options.tokens, f"{name}: a text came to an end"
            if index:
                speeds[name].append(num_tokens / seconds)
                forced[name] = (stats.num_forced_tokens - before) / num_tokens
    llm.close()
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    rows = []
    for name, speed in medians.items():
        ratio = speed / medians["free"]
        emit(benchmark="structured_throughput", model=options.model, batch=options.batch, backend=options.backend,
             grammar=name, tokens_per_second=round(speed, 1), ratio=round(ratio, 3), forced=round(forced[name], 3))  # fmt: skip
        rows.append([name, f"{speed:.1f}", f"{ratio:.3f}", f"{forced[name]:.0%}"])
    print_table(["grammar", "tokens/s", "of free", "forced"], rows)
    if "strings" in medians and options.model in SHAPES:
        print(f"bar of {BAR} for strings: {verdict(medians['strings'] >= BAR * medians['free'])}")


if __name__ == "__main__":
    main()
