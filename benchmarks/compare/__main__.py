"""Inflight and its peers, each with its best settings on all cores, taking turns workload by workload.

    python -m benchmarks.compare [--model qwen3-0.6b] [--formats bf16,int8,int4 or gguf]
                                 [--peers openvino,llamacpp,vllm,transformers] [--rounds 7]
                                 [--workloads standard] [--peers-home ~/.cache/peers] [--json FILE] [--before CHECKOUT]

Each engine is loaded once, in a process of its own that is stopped while another one runs. In every round each workload runs on
every engine once, the order changing from round to round; a ratio is of two runs of one round. Greedy, past every end token,
no prefix cache, the same token ids. `standard` are five workloads; `long` are prompts of 4k and 8k, whose time counts. Beside
the medians stand the ratios' medians with the smallest and the largest, and what the machine allows (`benchmarks.roofline`,
measured before and after, the better counts). With `--before` another checkout of Inflight is measured as a peer: this
shows what a change cost or gained.

A model that is a GGUF file (as the shapes qwen3-30b-a3b and gpt-oss-20b) is compared as it is stored, with llama.cpp.

Where all engines of a format do not fit the memory together, ours meets one peer after the other; where no two fit, each engine
runs all its rounds alone, so that the runs of a ratio are minutes apart. See `engines.py` for the environments that peers need.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from benchmarks.compare.driver import Settings
from benchmarks.compare.engines import DEFAULT_PEERS_HOME, OURS, PAIRINGS, PEERS, Engine, find_before, find_engine
from benchmarks.compare.process import EngineProcess
from benchmarks.compare.table import GOALS, Column, Pairs, markdown, table_rows
from benchmarks.shared.models import add_model_arguments, is_gguf, model_folder, read_into_page_cache, weight_bytes
from benchmarks.shared.report import allow_slow_steps, emit
from benchmarks.speed.roofline import (
    STORED,
    WEIGHT_BITS,
    Machine,
    Needs,
    measure_machine,
    print_machine,
    read_needs,
    tokens_per_second,
)
from inflight.config.free_memory import available_bytes
from inflight.entrypoints.cli.workloads import Workload, select

Speeds = dict[tuple[str, str], list[float]]  # (label of the engine, workload) -> tokens per second, by round
MIN_KV_BYTES = 1 << 30
ENGINE_BYTES = 10**9  # that our process may take beside weights and KV cache


class Comparison:
    """The rounds of one model and one set of workloads, format by format."""

    def __init__(self, args: argparse.Namespace, workloads: list[Workload]) -> None:
        self.folder: Path = model_folder(args.model, args.models)
        self.needs: Needs = read_needs(self.folder)
        self.formats: list[str] = args.formats or ([STORED] if is_gguf(self.folder) else [*WEIGHT_BITS])
        if is_gguf(self.folder) != (STORED in self.formats) or (STORED in self.formats and len(self.formats) > 1):
            raise SystemExit(f"--formats: a GGUF file has the format {STORED} only, and no other model has it")
        self._args = args
        self._workloads = workloads
        max_kv_tokens = max(each.batch_size * (each.input_len + each.output_len + 16) for each in workloads)
        self._settings = {
            "max_model_len": max(2048, *(each.input_len + each.output_len for each in workloads)),
            "max_num_seqs": max(each.batch_size for each in workloads),
            "max_kv_tokens": -(-max_kv_tokens // 256) * 256,
            "kv_bytes": max(MIN_KV_BYTES, int(1.25 * max_kv_tokens * self.needs.kv_bytes_per_token)),
        }

    def measure(self, our_format: str) -> list[Speeds]:
        """Of every session: one, or one per peer."""
        ours = self._engine(OURS, our_format)
        pairing = PAIRINGS[our_format]
        peers = [self._engine(name, pairing[name]) for name in self._args.peers if name in pairing]
        if self._args.before is not None:
            peers.append(find_before(self._args.before, our_format))
        size, free = weight_bytes(self.folder), available_bytes()
        if peers and 2 * (size + self._settings["kv_bytes"] + ENGINE_BYTES) > free:
            emit(benchmark="compare", note="no two engines fit the memory together: one after the other")
            speeds: Speeds = {}
            for engine in (ours, *peers):
                speeds |= self._session([engine])
            return [speeds]
        needed = (1 + len(peers)) * (1.5 * size + self._settings["kv_bytes"] + ENGINE_BYTES / 2)
        if needed <= free or len(peers) < 2:
            return [self._session([ours, *peers])]
        emit(benchmark="compare", note="the engines do not fit the memory together: one peer after the other")
        return [self._session([ours, peer]) for peer in peers]

    def _engine(self, name: str, weight_format: str) -> Engine:
        return find_engine(name, weight_format, self._args.peers_home)

    def _session(self, engines: list[Engine]) -> Speeds:
        speeds: Speeds = defaultdict(list)
        with ExitStack() as stack:
            processes = [stack.enter_context(self._start(engine)) for engine in engines]
            for index in range(-self._args.warm_up, self._args.rounds):
                order = processes if index % 2 == 0 else processes[::-1]
                for workload in self._workloads:
                    for process in order:
                        speed = process.run(workload)
                        label = process.engine.label
                        emit(
                            benchmark="compare", round=index, engine=label, workload=workload.name,
                            tokens_per_s=round(speed, 2),
                        )  # fmt: skip
                        if index >= 0:
                            speeds[label, workload.name].append(speed)
            peak = processes[0].peak_bytes()
            allowed = weight_bytes(self.folder) + self._settings["kv_bytes"] + ENGINE_BYTES
            emit(benchmark="compare", engine=engines[0].label, peak_bytes=peak, allowed_bytes=allowed)
        return speeds

    def _start(self, engine: Engine) -> EngineProcess:
        model = engine.convert(self.folder)
        read_into_page_cache(model)
        engine_args = json.loads(self._args.engine_args) if engine.name == OURS else {}
        settings = Settings(
            folder=str(model.resolve()), weight_format=engine.weight_format, engine_args=engine_args, **self._settings
        )
        process = EngineProcess(engine, settings)
        emit(benchmark="compare", engine=engine.label, startup_s=round(process.startup.total, 2))
        return process

    def columns(self, our_format: str, sessions: list[Speeds], machine: Machine) -> dict[str, Column]:
        """By workload."""
        ours = f"{OURS} {our_format}"
        goals = GOALS.get((self.folder.name, our_format), {})
        found = {}
        for workload in self._workloads:
            peers = {
                label: Pairs(speeds[ours, workload.name], theirs)
                for speeds in sessions
                for (label, name), theirs in speeds.items()
                if name == workload.name and label != ours
            }
            found[workload.name] = Column(
                ours=[speed for speeds in sessions for speed in speeds[ours, workload.name]],
                peers=peers,
                roofline=tokens_per_second(self.needs, machine, our_format, workload),
                goal=goals.get(workload.name),
            )
        return found


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser, "qwen3-0.6b")
    parser.add_argument(
        "--formats", type=_names(PAIRINGS), default=None, help="of ours [bf16,int8,int4; of a file gguf]"
    )
    parser.add_argument("--peers", type=_names(PEERS), default=list(PEERS), help=f"[{','.join(PEERS)}]; none is ''")
    parser.add_argument("--peers-home", type=Path, default=DEFAULT_PEERS_HOME, help="their environments [%(default)s]")
    parser.add_argument(
        "--before", type=Path, metavar="CHECKOUT", help="another checkout of Inflight, measured as a peer"
    )
    parser.add_argument("--rounds", type=int, default=7, help="that count [%(default)s]")
    parser.add_argument("--warm-up", type=int, choices=(0, 1, 2), default=1, help="rounds before them [%(default)s]")
    parser.add_argument("--workloads", default="standard", help="standard, long, or names of workloads [%(default)s]")
    parser.add_argument("--engine-args", default="{}", help='JSON: further arguments of our LLM, as {"num_threads": 2}')
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    return parser


def _names(known: Collection[str]) -> Callable[[str], list[str]]:
    """A parser of comma-separated names, each one of `known`."""

    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return list(dict.fromkeys(names))

    return parse


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    if args.rounds < 1 or args.formats == []:
        parser.error("--rounds must be 1 or more, and --formats name one")
    try:
        workloads = select(args.workloads.replace("standard", "all"))
    except ValueError as error:
        parser.error(str(error))
    allow_slow_steps()
    comparison = Comparison(args, workloads)
    machine = measure_machine()
    sessions = {our_format: comparison.measure(our_format) for our_format in comparison.formats}
    machine = machine.best(measure_machine())
    print_machine([machine])
    report: dict[str, object] = {"model": comparison.folder.name, "machine": asdict(machine), "formats": {}}
    formats: dict[str, object] = {}
    for our_format, speeds in sessions.items():
        columns = comparison.columns(our_format, speeds, machine)
        formats[our_format] = {name: asdict(column) for name, column in columns.items()}
        print(f"\n{comparison.folder.name}, {our_format}, {args.rounds} rounds; ratios: median (smallest-largest)\n")
        print(markdown(table_rows(f"{OURS} {our_format}", columns)))
    report["formats"] = formats
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
