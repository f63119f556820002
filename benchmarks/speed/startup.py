"""From the start of the process to the first token: imports, constructor, first step. Fresh processes, files in the page cache.

    python -m benchmarks.startup [--model qwen3-0.6b] [--models FOLDER] [--rounds 5] [--weight-formats bf16] [--transformers]

Medians; the goal is 3 s for everything together. An engine that is ready has run no warm-up beyond its own.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from pathlib import Path

from benchmarks.compare.driver import Settings
from benchmarks.compare.engines import OURS, PAIRINGS, Engine, find_engine
from benchmarks.compare.process import EngineProcess, Startup
from benchmarks.shared.models import add_model_arguments, model_folder, read_into_page_cache
from benchmarks.shared.report import emit, print_table, verdict

GOAL_S = 3.0


def measure(engine: Engine, folder: Path) -> Startup:
    settings = Settings(
        folder=str(folder.resolve()),
        weight_format=engine.weight_format,
        max_model_len=2048,
        max_num_seqs=64,
        max_kv_tokens=16384,
        kv_bytes=2 << 30,
    )
    with EngineProcess(engine, settings) as process:
        return process.startup


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser, "qwen3-0.6b")
    parser.add_argument("--rounds", type=int, default=5, help="fresh processes of each [%(default)s]")
    parser.add_argument("--weight-formats", nargs="*", choices=[*PAIRINGS], default=["bf16"], help="of ours [bf16]")
    parser.add_argument("--transformers", action="store_true", help="transformers, too")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds must be 1 or more")
    folder = model_folder(args.model, args.models)
    engines = [find_engine(OURS, weight_format, Path()) for weight_format in args.weight_formats]
    if args.transformers:
        engines.append(find_engine("transformers", "bf16", Path()))
    read_into_page_cache(folder)
    found: dict[Engine, list[Startup]] = defaultdict(list)
    for index in range(args.rounds):
        for engine in engines:
            startup = measure(engine, folder)
            found[engine].append(startup)
            parts = {name: round(seconds, 3) for name, seconds in vars(startup).items()}
            emit(benchmark="startup", round=index, engine=engine.label, **parts, total=round(startup.total, 3))
    rows = []
    for engine, startups in found.items():
        medians = [statistics.median(getattr(each, name) for each in startups) for name in vars(startups[0])]
        total = statistics.median(each.total for each in startups)
        met = verdict(total < GOAL_S) if engine.name == OURS else ""
        rows.append([engine.label, *(f"{seconds:.2f}" for seconds in (*medians, total)), met])
    print_table(["startup", "imports s", "constructor s", "first token s", "together s", f"< {GOAL_S:g} s"], rows)


if __name__ == "__main__":
    main()
