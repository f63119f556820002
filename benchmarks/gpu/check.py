"""What a machine with one GPU can tell in fifteen minutes, in two commands that need no network: `scripts/gpu_check`.

    scripts/gpu_check faults    280 s: what has never run on a GPU, or may be wrong; then the tests of tests/gpu
    scripts/gpu_check speed     400 s: decode, long contexts, formats, drafts, prompts, beside their floors
    scripts/gpu_check all       both, and the comparison with transformers; give --budget-seconds

        [--only NAME ...] [--skip-tests] [--quick] [--budget-seconds N] [--output FOLDER] [--device cpu]

Needs the repository, torch, triton, transformers, numpy, safetensors, tokenizers, jinja2, tqdm, pytest and hypothesis. Each
part is a process of its own and cannot take the others with it; --list names them. What there is no time for is at the end.

Results are printed as they come, a JSON line each; a short table is last. FOLDER (gpu_check, if it is not given) gets
gpu_check.json, which is complete after each result, and gpu_check.log, all lines of the parts behind their names. At a
time-out, at SIGTERM and if this process is killed the parts end, too, and what was measured is in the file.

--device cpu runs the parts on a tiny model where there is no GPU, to try the command; its figures mean nothing.
Exits with 1 if a part failed or a test did, and with 143 after SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any

from benchmarks.gpu.parts import COMMANDS, Part, parts_of
from benchmarks.gpu.processes import PartResult, end_all, run_part
from benchmarks.gpu.summary import goals, relations, short_table, table

END_SECONDS = 5.0  # kept for the table
MIN_SECONDS = 10.0  # less is not worth starting a part


class Check:
    """Runs parts until the budget is spent. `results` are in the order of the parts.

    Args:
        folder: gets the log and the results; None: nothing is written.
    """

    def __init__(self, budget_seconds: float, folder: Path | None, device: str = "cuda") -> None:
        self.results: dict[str, PartResult] = {}
        self._end = time.monotonic() + budget_seconds - END_SECONDS
        self._folder, self._device, self._lock = (
            folder,
            device,
            RLock(),
        )  # a handler of signals may run in a locked part
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "gpu_check.log").write_text("")

    def run(self, parts: list[Part]) -> None:
        self.results = {part.name: PartResult(part.name, status="skipped") for part in parts}
        for part in parts:
            self._run_part(part)

    def save(self) -> dict[str, Any]:  # Any: JSON
        """Writes everything that is known so far, whole or not at all, and returns it without the longest figures."""
        with self._lock:
            found = as_json(self.results, self._device)
            if self._folder is not None:
                every = {name: result.figures for name, result in self.results.items()}
                new = self._folder / "gpu_check.new"
                new.write_text(json.dumps({**found, "figures": every}, indent=1), encoding="utf-8")
                new.replace(self._folder / "gpu_check.json")
            return found

    def _run_part(self, part: Part) -> None:
        seconds = min(part.limit_seconds, self._end - time.monotonic())
        result = self.results[part.name]
        if seconds < min(MIN_SECONDS, part.limit_seconds):
            result.error = "no time was left"
        else:
            run_part(part, seconds, partial(self._write, part.name), self._tell, result)
        self._tell(json.dumps({"part": part.name, **result.as_json()}))

    def _tell(self, line: str) -> None:
        with self._lock:
            print(line, flush=True)
            self.save()

    def _write(self, name: str, text: str) -> None:
        if self._folder is not None:
            with self._lock, (self._folder / "gpu_check.log").open("a", encoding="utf-8") as file:
                file.write(f"{name}: {text}\n")


def as_json(results: dict[str, PartResult], device: str) -> dict[str, Any]:  # Any: JSON
    figures = {name: result.figures for name, result in results.items() if result.figures}
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "device": device,
        "table": table(figures),
        "relations": relations(figures),
        "goals": goals(figures),
        "parts": {name: result.as_json() for name, result in results.items()},
    }


def _end_at_signal(number: int, frame: object) -> None:
    end_all()
    raise SystemExit(128 + number)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these parts; see --list")
    parser.add_argument("--skip-tests", action="store_true", help="without the files of tests/gpu")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    parser.add_argument("--budget-seconds", type=float, help="for everything [faults: 280, speed: 400, all: 840]")
    parser.add_argument("--output", type=Path, default=Path("gpu_check"), help="a folder for the results [gpu_check]")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--list", action="store_true", help="print the parts and the seconds they are expected to take")
    args = parser.parse_args(arguments)
    parts = parts_of(args.command, args.device, quick=args.quick)
    if args.list:
        for part in parts:
            print(f"{part.name:<24} {part.expected_seconds:4.0f} s")
        return 0
    if unknown := sorted(set(args.only or ()) - {part.name for part in parts}):
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(part.name for part in parts)}")
    chosen = [part for part in parts if not (part.is_test and args.skip_tests)]
    chosen = [part for part in chosen if args.only is None or part.name in args.only]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _end_at_signal)
    check = Check(args.budget_seconds or COMMANDS[args.command], args.output, args.device)
    try:
        check.run(chosen)
    finally:
        print(short_table(check.save()), flush=True)
    return 0 if all(result.status == "ok" for result in check.results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
