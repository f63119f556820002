"""The GPU tests and then the table of figures, on a machine with a GPU, within a time: `scripts/gpu_check`.

    scripts/gpu_check [--only NAME ...] [--skip-tests] [--quick] [--budget-seconds 540] [--output FOLDER] [--device cpu]

Needs the repository, torch, triton, transformers, numpy, safetensors, tokenizers, jinja2, tqdm, pytest and hypothesis; no
network. Each part is a process of its own and cannot take the others with it. Test files run side by side, figures one by one;
--list names them.
Results are printed as they come, a JSON line each; the last line is one JSON object with everything. FOLDER gets
gpu_check.json, with more kernels, and gpu_check.log, all that the parts have printed.

--device cpu runs the figures on a tiny model where there is no GPU, to try the command; its figures mean nothing.
Exits with 1 if a part failed or a test did.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Any

from benchmarks.gpu.parts import Part, all_parts
from benchmarks.gpu.processes import PartResult, run_part
from benchmarks.gpu.summary import goals, relations, table

END_SECONDS = 5.0  # kept for the table
MIN_SECONDS = 10.0  # less is not worth starting a part


class Check:
    """Runs parts until the budget is spent. `results` are in the order of the parts."""

    def __init__(self, budget_seconds: float, log: Path | None) -> None:
        self.results: dict[str, PartResult] = {}
        self._end = time.monotonic() + budget_seconds - END_SECONDS
        self._log, self._lock = log, Lock()

    def run(self, parts: list[Part]) -> None:
        self.results = {part.name: PartResult(part.name, status="skipped") for part in parts}
        together = [part for part in parts if part.is_side_by_side]
        if together:
            with ThreadPoolExecutor(len(together)) as pool:
                list(pool.map(self._run_part, together))
        for part in parts:
            if not part.is_side_by_side:
                self._run_part(part)

    def _run_part(self, part: Part) -> None:
        seconds = min(part.limit_seconds, self._end - time.monotonic())
        if seconds < min(MIN_SECONDS, part.limit_seconds):
            self.results[part.name].error = "no time was left"
        else:
            result = run_part(part, seconds, self._write, self._tell)
            self.results[part.name] = result
        self._tell(json.dumps({"part": part.name, **self.results[part.name].as_json()}))

    def _tell(self, line: str) -> None:
        with self._lock:
            print(line, flush=True)

    def _write(self, text: str) -> None:
        if self._log is not None:
            with self._lock, self._log.open("a", encoding="utf-8") as file:
                file.write(text + "\n")


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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these parts; see --list")
    parser.add_argument("--skip-tests", action="store_true", help="the figures alone")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    parser.add_argument("--budget-seconds", type=float, default=540.0, help="for everything [540]")
    parser.add_argument("--output", type=Path, help="a folder for the results")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--list", action="store_true", help="print the parts and the seconds they are expected to take")
    args = parser.parse_args(arguments)
    parts = all_parts(args.device, quick=args.quick)
    if args.list:
        for part in parts:
            print(f"{part.name:<24} {part.expected_seconds:4.0f} s")
        return 0
    if unknown := sorted(set(args.only or ()) - {part.name for part in parts}):
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(part.name for part in parts)}")
    chosen = [part for part in parts if not (part.is_test and args.skip_tests)]
    chosen = [part for part in chosen if args.only is None or part.name in args.only]
    log = None
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)
        log = args.output / "gpu_check.log"
        log.write_text("")
    check = Check(args.budget_seconds, log)
    try:
        check.run(chosen)
    finally:  # an interrupt, too: what was measured is not lost
        found = as_json(check.results, args.device)
        if args.output is not None:
            every = {name: result.figures for name, result in check.results.items()}
            text = json.dumps({**found, "figures": every}, indent=1)
            (args.output / "gpu_check.json").write_text(text, encoding="utf-8")
        print(json.dumps(found, separators=(",", ":")), flush=True)
    return 0 if all(result.status == "ok" for result in check.results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
