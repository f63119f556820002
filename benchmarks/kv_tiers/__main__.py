"""What KV blocks outside of the KV cache bring: ratios of one run, each beside its bar (the value that it must reach).

    python -m benchmarks.kv_tiers [--model qwen3-0.6b] [--prompt-len 4096] [--rounds 5] [--only first-token,steps]
    python -m benchmarks.kv_tiers --quick

first-token   the first token of a prompt from the host pool, from files, from Redis and, after a restart, from files, against
              computing it; the bytes loaded if most of a prompt is in the arena
bandwidth     host pool to arena against memcpy, files against O_DIRECT reads, Redis against bare recv_into
steps         steps while blocks are saved and loaded, and throughput if no block is used again, against an engine without
host pool slow-tier     the first token with tiers of several speeds, against the faster of waiting and computing
chats         hits of chats that need four times the arena, against a cache without bound
agents        sessions of 30 turns that need four times the arena: what a turn computes again, and its first token

Most figures are medians of the rounds: both sides run in turns, in an order that changes. chats and agents run once. Files are
read with O_DIRECT, and are not in the page cache. `--quick` takes a tiny model: it shows that everything runs, and its figures
say nothing, because computing a token of it takes less time than reading one. Exit code 1: an answer from saved blocks differs
from the computed one.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.kv_tiers import agents, bandwidth, chats, first_token, slow_tier, steps
from benchmarks.kv_tiers.setting import Row, Setting
from benchmarks.shared.models import add_model_arguments, model_folder
from benchmarks.shared.report import allow_slow_steps, emit, print_table

HEADER = ["what", "median", "least-most", "bar", "reached", ""]


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "an unknown processor"


def machine() -> str:
    """The processor, its cores, and how busy they were in the last minute."""
    return f"{processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description="KV blocks in host memory, files and Redis, against computing them.")
    add_model_arguments(parser, "qwen3-0.6b")
    parser.add_argument("--prompt-len", type=int, default=4096, help="[%(default)s]")
    parser.add_argument("--rounds", type=int, default=5, help="[%(default)s]")
    parser.add_argument("--only", help="names of measurements, with commas between them [all]")
    parser.add_argument("--folder", type=Path, help="where files are written [the folder of temporary files]")
    parser.add_argument("--num-threads", type=int, help="compute threads [one a core]")
    parser.add_argument("--quick", action="store_true", help="qwen3-tiny, 512 tokens, one round")
    args = parser.parse_args()
    if args.quick:
        args.model, args.prompt_len, args.rounds = "qwen3-tiny", 512, 1
    if args.prompt_len < 512 or args.rounds < 1:
        parser.error("--prompt-len must be at least 512, and --rounds at least 1")
    allow_slow_steps()
    with tempfile.TemporaryDirectory(prefix="kv-tiers-", dir=args.folder) as folder:
        setting = Setting(
            model=model_folder(args.model, args.models).resolve(), prompt_len=args.prompt_len, rounds=args.rounds,
            folder=Path(folder), num_threads=args.num_threads,
        )  # fmt: skip
        measurements: dict[str, Callable[[], list[Row]]] = {
            "first-token": lambda: first_token.rows(setting),
            "bandwidth": lambda: bandwidth.rows(setting),
            "steps": lambda: steps.rows(setting, is_quick=args.quick),
            "slow-tier": lambda: slow_tier.rows(setting),
            "chats": lambda: chats.rows(setting, is_quick=args.quick),
            "agents": lambda: agents.rows(setting, is_quick=args.quick),
        }
        chosen = args.only.split(",") if args.only else [*measurements]
        if unknown := sorted(set(chosen) - set(measurements)):
            parser.error(f"--only: {unknown[0]} is none of {', '.join(measurements)}")
        before, rows = machine(), []
        for name in chosen:
            rows += measurements[name]()
    differing = setting.num_differing
    rows.append(Row(f"answers that differ, of {setting.num_compared}", [differing], 0))
    emit(benchmark="kv_tiers", before=before, after=machine(), rounds=args.rounds, model=args.model)
    print_table(HEADER, [row.cells() for row in rows])
    print(f"\n{args.model}, {args.rounds} rounds. {before} before, {os.getloadavg()[0]:.1f} after.")
    if differing:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
