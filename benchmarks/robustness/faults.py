"""Damages an `inflight serve` under load, and counts what was lost: no request may be lost, and no answer may differ.

    python -m benchmarks.faults --fault sigkill --target rank --times 20 -- -tp 2
    python -m benchmarks.faults --fault sigkill --target front-end --times 20 -- --api-server-count 2
    python -m benchmarks.faults --all -- -tp 2
    python -m benchmarks.faults --fault none --oversubscribe 4 --seconds 1800 -- -tp 2
    python -m benchmarks.faults --fault none --seconds 3600 -- -tp 2 --kv-cache-memory-bytes 32M
    python -m benchmarks.faults --compare-off -- -tp 2
    python -m benchmarks.faults --chaos 600 --seed 1 -- -tp 2 --api-server-count 2
    python -m benchmarks.faults --chaos 600 --memory-factor 1.1 -- -tp 2 --kv-cache-memory-bytes 32M

Starts the server (the embedded model in float32; options after `--` are those of `inflight serve`) and measures its cold
start. Then 8 clients send 100 requests each, of eight kinds, without faults: these answers are the truth. Then the clients
send the same requests again, with a prefix cache of their own, and faults happen at random moments. A moment is a number of
answered requests and a short delay. The next fault waits until the server has recovered from the one before.

Prints the requests that were lost, the answers that differ, the longest silence of a stream as a share of the cold start,
how fast the server noticed a fault (the first line of its log after the fault), output tokens per second of a steady load
in turns on this server after the faults and on a fresh one, how much memory a long run (`--seconds`) has taken, and the
recoveries that the server has counted.

`--chaos` hits any process at any moment instead, also while the server starts, recovers and drains, and adds shortages: see
fault_chaos.py. It also compares what the processes use before and after. With `--memory-factor` it first measures what a
server and the load need without faults. Then the server that is hit and all its processes may use so many times as much
memory together (in a control group, like a container). A process that the kernel ends at this limit is a fault like the others.

Exit code 1: a request was lost, an answer differs, the server did not recover, a fault could not happen, or the server
counted a recovery without a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.robustness import fault_chaos
from benchmarks.robustness.fault_injection import (
    FAULTS,
    MAX_RECOVERY_SECONDS,
    TARGETS,
    CannotInject,
    Fault,
    Injected,
    Injector,
)
from benchmarks.robustness.fault_load import Load, Outcome, steady_tokens_per_second
from benchmarks.robustness.fault_requests import Choice, LoadRequest, difference, draw_requests
from benchmarks.robustness.fault_server import POLL_SECONDS, FaultServer
from benchmarks.robustness.faulty_worker import ORDERS, ORDERS_VARIABLE
from benchmarks.robustness.memory_limit import MemoryGroup
from benchmarks.shared.in_turns import compare_in_turns
from benchmarks.shared.report import MIB, emit, print_table, verdict

MAX_DELAY_SECONDS = 0.1  # between the answer that triggers a fault and the fault
SILENCE_GOAL, SILENCE_GOAL_WITH_SPARE = 0.8, 0.2  # longest silence / cold start
SPEED_GOAL, SPEED_GOAL_ON = 0.98, 0.99
NOTICE_GOALS = {"sigkill": 0.05, "sigstop": 2.0, "two-ranks": 0.05}
MEMORY_GOAL = 1.01  # in a long run
MIN_MEMORY_SAMPLES = 8
NUM_SHOWN = 5
STEADY_STREAMS = 8
_MAX_RECOVERIES = {"max_recoveries": 1000}  # the faults of a benchmark come faster than the default allows


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one run does.

    Attributes:
        faults: in the order in which they happen. A fault happens when a drawn number of requests has been answered. If the
            load ends before the last fault, it is sent again.
        options: of `inflight serve`, as a user writes them.
        max_tokens: most output tokens of a request that is not a chat.
        seconds: repeat the load at least for this time. Faults happen only in the first round.
        is_chaos: whether any process is hit for `seconds`, instead of `faults`.
        memory_factor: with `is_chaos`, the memory that the server may use, divided by what it needs without faults. None:
            there is no limit.
        oversubscribe: how many busy processes run per core meanwhile.
        steady_tokens: output tokens of each request of the steady load; 0 leaves it out.
    """

    faults: Sequence[Fault]
    options: Sequence[str] = ()
    num_clients: int = 8
    num_requests: int = 100
    max_tokens: int = 64
    seed: int = 0
    seconds: float = 0.0
    oversubscribe: int = 0
    is_chaos: bool = False
    memory_factor: float | None = None
    steady_tokens: int = 256
    steady_rounds: int = 5


@dataclass
class Result:
    """What one run found.

    Attributes:
        differences: request and what differs, of each answer that is not the truth.
        not_injected: why a fault could not happen.
        truth_silence: the longest silence of a stream without faults.
        speeds: a row: output tokens per second of the steady load on a fresh server, on this one after the faults, and their
            ratio. Empty if it was left out or failed.
        memory: anonymous bytes of all processes of the server after each round of the load.
    """

    cold_start_seconds: float
    outcomes: list[Outcome] = field(default_factory=list)
    injected: list[Injected] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    not_injected: list[str] = field(default_factory=list)
    truth_silence: float = 0.0
    speeds: Sequence[str] = ()
    memory: list[int] = field(default_factory=list)
    num_recoveries: Mapping[str, int] = field(default_factory=dict)
    log: str = ""

    @property
    def lost(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.choices is None]

    @property
    def num_sent_again(self) -> int:
        return sum(outcome.num_sends > 1 for outcome in self.outcomes)

    @property
    def longest_silence(self) -> float:
        return max((outcome.longest_silence for outcome in self.outcomes), default=0.0)

    def problems(self, plan: Plan) -> list[str]:
        """Returns why this run has failed; empty if it has not."""
        found = [f"{outcome.request.name} was lost: {outcome.error}" for outcome in self.lost]
        found += [f"the answer differs: {text}" for text in self.differences]
        found += [f"a fault could not happen: {text}" for text in self.not_injected]
        found += [
            f"the server did not recover from {each.fault.name}"
            for each in self.injected
            if each.recovered_seconds is None
        ]
        if not plan.faults and not plan.is_chaos and self.num_recoveries:
            found.append(f"nothing was damaged, but the server counted recoveries: {dict(self.num_recoveries)}")
        return found


def run(plan: Plan) -> Result:
    """Start a server, send the load without faults and with faults, and compare the answers.

    Raises:
        SystemExit: the server does not start, or a request was lost before the first fault.
    """
    with tempfile.TemporaryDirectory(prefix="faults-") as folder, contextlib.ExitStack() as stack:
        server = stack.enter_context(start_server(plan, Path(folder)))
        result = Result(server.cold_start_seconds)
        requests = draw_requests(plan.seed, plan.num_clients, plan.num_requests, plan.max_tokens)
        truth = truth_of(Load(server.address, _salted(requests, "truth")), result)
        with busy_processes(plan.oversubscribe * (os.cpu_count() or 1)):
            end = time.monotonic() + plan.seconds
            injector = Injector(server, Path(folder), random.Random(plan.seed))
            left = plan.faults
            for number in range(sys.maxsize):
                load = Load(server.address, _salted(requests, f"round {number}"), _may_break_connections(plan))
                left = _run_with_faults(load, left, injector, random.Random(f"moments {plan.seed} {number}"), result)
                compare(truth, load.outcomes, result)
                result.memory.append(server.anonymous_bytes())
                if (time.monotonic() >= end and not left) or result.lost:
                    break
        result.num_recoveries = server.num_recoveries()
        result.log = server.text_of_log()
        with contextlib.suppress(SystemExit):  # the server may be dead
            if plan.steady_tokens:
                fresh = stack.enter_context(start_server(plan, Path(folder)))
                result.speeds = _steady_in_turns("fresh, after the faults", fresh, server, plan)
    return result


def run_chaos(plan: Plan) -> tuple[Result, fault_chaos.Chaos]:
    """Damage a server at all moments of its life, for `plan.seconds`. Returns what was found."""
    if plan.memory_factor is None:
        return _run_chaos(plan, ())
    with MemoryGroup() as group:
        with group.peak() as peak:
            _run_in_peace(plan, group.prefix)
        limit = round(peak[0] * plan.memory_factor)
        group.limit(limit)
        print(f"needed without faults: {peak[0] / MIB:,.0f} MiB; limit: {limit / MIB:,.0f} MiB", flush=True)
        result, chaos = _run_chaos(plan, group.prefix)
        chaos.counts["processes that the kernel ended at the limit of memory"] = group.num_kills()
        return result, chaos


def _run_in_peace(plan: Plan, prefix: Sequence[str]) -> None:
    """Serve the load without faults."""
    arguments, options = _chaos_options(plan)
    requests = draw_requests(plan.seed, plan.num_clients, plan.num_requests, plan.max_tokens)
    with FaultServer(options, arguments=arguments, prefix=prefix) as server:
        server.wait_until_recovered(MAX_RECOVERY_SECONDS)
        truth_of(Load(server.address, requests), Result(server.cold_start_seconds))


def _chaos_options(plan: Plan) -> tuple[list[str], dict[str, object]]:
    arguments = with_fault_tolerance(plan.options, {"max_recoveries": 60_000, "spare_workers": 1})
    return arguments, {"dtype": "float32", "shutdown_timeout": fault_chaos.DRAIN_SECONDS}


def _run_chaos(plan: Plan, prefix: Sequence[str]) -> tuple[Result, fault_chaos.Chaos]:
    """`prefix`: a command that runs the server."""
    rng, chaos = random.Random(f"chaos {plan.seed}"), fault_chaos.Chaos()
    arguments, options = _chaos_options(plan)
    requests = draw_requests(plan.seed, plan.num_clients, plan.num_requests, plan.max_tokens)
    with tempfile.TemporaryDirectory(prefix="faults-") as name, fault_chaos.small_folder(Path(name)) as is_small:
        folder = Path(name)
        kinds = [kind for kind in fault_chaos.SHORTAGES if is_small or kind != "disk"]
        server = fault_chaos.ChaosServer(rng, chaos, options, {"TMPDIR": name}, arguments=arguments, prefix=prefix)
        with server:
            result = Result(server.cold_start_seconds)
            server.wait_until_recovered(MAX_RECOVERY_SECONDS)
            truth = truth_of(Load(server.address, _salted(requests, "truth")), result)
            before, files = server.usage(), set(os.listdir(folder))
            bursts = threading.Thread(
                target=fault_chaos.serve_bursts, args=(server, plan.seconds, rng, chaos, folder, kinds)
            )
            bursts.start()
            for number in itertools.count():
                was_hit = bursts.is_alive()
                salted = _salted(requests, f"round {number}")
                load = Load(server.address, salted, True, sys.maxsize, is_over=lambda: server.has_ended)
                load.run()
                compare(truth, load.outcomes, result)
                if not was_hit or server.has_ended:
                    break
            bursts.join()
            if result.num_sent_again and not chaos.may_break_connections:
                chaos.problems.append(f"{result.num_sent_again} connections broke without a reason")
            if not server.has_ended:
                fault_chaos.check_rest(server, before, chaos)
                result.num_recoveries = server.num_recoveries()
                chaos.problems += [f"a file is left: {each}" for each in sorted(set(os.listdir(folder)) - files)]
                last = fault_chaos.drain_under_load(server, _salted(requests, "drain"), chaos)
                compare(truth, [outcome for outcome in last.outcomes if outcome.choices is not None], result)
        result.log = server.text_of_log()
        chaos.problems += [f"a file is left at the end: {each}" for each in sorted(os.listdir(folder))]
    return result, chaos


def report_chaos(plan: Plan, result: Result, chaos: fault_chaos.Chaos) -> bool:
    """Print what was found. Returns whether the server has survived everything."""
    for text in (problems := [*result.problems(plan), *chaos.problems])[:NUM_SHOWN]:
        print(text[:1000])
    emit(
        benchmark="chaos", options=list(plan.options), requests=len(result.outcomes), lost=len(result.lost),
        differing=len(result.differences), sent_again=result.num_sent_again, faults=dict(chaos.counts),
        problems=len(problems), recoveries=dict(result.num_recoveries),
    )  # fmt: skip
    rows: list[Sequence[object]] = [
        ["requests lost", f"{len(result.lost)} of {len(result.outcomes)}", "0", verdict(not result.lost)],
        ["answers that differ", len(result.differences), "0", verdict(not result.differences)],
        ["other problems", len(chaos.problems), "0", verdict(not chaos.problems)],
        ["requests sent again: a front end was hit, or had no descriptor", result.num_sent_again, "", ""],
        ["recoveries counted by the server", json.dumps(dict(result.num_recoveries)), "", ""],
        *([name, count, "", ""] for name, count in sorted(chaos.counts.items())),
    ]
    print_table(["what", "value", "goal", ""], rows)
    return not problems


def with_fault_tolerance(options: Sequence[str], defaults: Mapping[str, object]) -> list[str]:
    """Returns the options of `inflight serve` with `defaults` for what their --fault-tolerance-config does not set."""
    name, changed = "--fault-tolerance-config", [*options]
    given = changed[changed.index(name) + 1] if name in changed else "{}"
    return [*changed, name, json.dumps({**defaults, **json.loads(given)})]  # the last one counts


def start_server(plan: Plan, orders: Path, **options: bool) -> FaultServer:
    """Start the server of a run. `options` are further options of `inflight serve`."""
    arguments = list(plan.options)
    if len(plan.faults) > 5:
        arguments = with_fault_tolerance(arguments, _MAX_RECOVERIES)
    if any(fault.kind in ORDERS for fault in plan.faults) and "--distributed-executor-backend" not in arguments:
        arguments += ["--distributed-executor-backend", "benchmarks.robustness.faulty_worker:FaultyExecutor"]
    return FaultServer({"dtype": "float32", **options}, {ORDERS_VARIABLE: str(orders)}, arguments=arguments)


def truth_of(load: Load, result: Result) -> dict[str, list[Choice]]:
    """Returns the answers of a load that runs without faults, by the names of the requests."""
    outcomes = load.run()
    for outcome in outcomes:
        if outcome.choices is None:
            raise SystemExit(f"without a fault {outcome.request.name} was lost: {outcome.error}")
    result.truth_silence = max(outcome.longest_silence for outcome in outcomes)
    return {outcome.request.name: outcome.choices for outcome in outcomes if outcome.choices is not None}


def compare(truth: Mapping[str, list[Choice]], outcomes: Sequence[Outcome], result: Result) -> None:
    """Add the outcomes, and what differs from the truth, to the result."""
    result.outcomes += outcomes
    for outcome in outcomes:
        if outcome.choices is not None and (text := difference(truth[outcome.request.name], outcome.choices)):
            result.differences.append(f"{outcome.request.name}: {text}")


def _run_with_faults(
    load: Load, faults: Sequence[Fault], injector: Injector, rng: random.Random, result: Result
) -> Sequence[Fault]:
    """Run the load, and inject the faults one after another, each when a drawn number of requests has been answered.
    Returns the faults that are left, because the load has ended before. The first fault always happens."""
    count = sum(len(requests) for requests in load.requests)
    last = count - 2 * len(load.requests)  # the last fault must come before the clients run out of requests
    moments = sorted(rng.randrange(max(last * index // len(faults), 1), max(last * (index + 1) // len(faults), 2))
                     for index in range(len(faults)))  # fmt: skip
    runner = threading.Thread(target=load.run)
    runner.start()
    num_done = 0
    for fault, moment in zip(faults, moments, strict=True):
        while len(load.outcomes) < moment:
            time.sleep(POLL_SECONDS)
        time.sleep(rng.uniform(0.0, MAX_DELAY_SECONDS))
        if num_done and not runner.is_alive():
            break
        num_done += 1
        try:
            result.injected.append(injector.inject(fault))
        except CannotInject as error:
            result.not_injected.append(f"{fault.name}: {error}")
    runner.join()
    return faults[num_done:]


def _salted(requests: Sequence[Sequence[LoadRequest]], salt: str) -> list[list[LoadRequest]]:
    return [[request.with_cache_salt(salt) for request in each] for each in requests]


def _may_break_connections(plan: Plan) -> bool:
    return any(fault.target == "front-end" for fault in plan.faults)


def _steady_in_turns(case: str, first: FaultServer, second: FaultServer, plan: Plan) -> list[str]:
    """Returns a row: output tokens per second of the steady load on both servers, in turns, and second / first."""
    numbers = itertools.count()

    def measure(server: FaultServer) -> float:
        salt = f"steady {next(numbers)}"
        return steady_tokens_per_second(server.address, STEADY_STREAMS, plan.steady_tokens, salt)

    return compare_in_turns("faults", case, lambda: measure(first), lambda: measure(second), plan.steady_rounds)


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Meanwhile `count` processes compute without a pause."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def compare_off(plan: Plan) -> list[str]:
    """Returns a row: tokens per second without and with fault tolerance, in turns on two servers that both stay loaded."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        off = start_server(plan, Path(folder), enable_fault_tolerance=False)
        with off, start_server(plan, Path(folder), enable_fault_tolerance=True) as on:
            return _steady_in_turns("off, on", off, on, plan)


def report(plan: Plan, result: Result) -> None:
    """Print what was found: the first problems, a JSON line, and a table with two rows for each kind of fault."""
    for text in (problems := result.problems(plan))[:NUM_SHOWN]:
        print(text[:1000])
    if len(problems) > NUM_SHOWN:
        print(f"... and {len(problems) - NUM_SHOWN} more")
    spares = any("spare_workers" in option for option in plan.options)
    goal = SILENCE_GOAL_WITH_SPARE if spares else SILENCE_GOAL
    silence = result.longest_silence / result.cold_start_seconds
    emit(
        benchmark="faults", options=list(plan.options), requests=len(result.outcomes), lost=len(result.lost),
        differing=len(result.differences), sent_again=result.num_sent_again, faults=len(result.injected),
        longest_silence_seconds=round(result.longest_silence, 3), cold_start_seconds=round(result.cold_start_seconds, 3),
        silence_without_faults_seconds=round(result.truth_silence, 3), recoveries=dict(result.num_recoveries),
    )  # fmt: skip
    rows: list[Sequence[object]] = [
        ["requests lost", f"{len(result.lost)} of {len(result.outcomes)}", "0", verdict(not result.lost)],
        ["answers that differ", len(result.differences), "0", verdict(not result.differences)],
        ["requests sent again by clients", result.num_sent_again, "", ""],
        ["longest silence without faults", f"{result.truth_silence:.2f} s", "", ""],
        ["longest silence", f"{result.longest_silence:.2f} s", "", ""],
        [
            "longest silence / cold start",
            f"{silence:.2f} of {result.cold_start_seconds:.1f} s",
            goal,
            verdict(silence <= goal),
        ],
        ["recoveries counted by the server", json.dumps(dict(result.num_recoveries)), "", ""],
    ]
    for name in sorted({each.fault.name for each in result.injected}):
        rows += _fault_rows(name, [each for each in result.injected if each.fault.name == name])
    if len(result.memory) >= MIN_MEMORY_SAMPLES:
        growth = memory_growth(result.memory)
        rows.append(
            [
                "memory of its processes, last quarter / second quarter of the time",
                f"{growth:.3f} of {result.memory[-1] / MIB:,.0f} MiB",
                MEMORY_GOAL,
                verdict(growth <= MEMORY_GOAL),
            ]
        )
    if result.speeds:
        _, fresh, after, ratio = result.speeds
        rows.append(["tokens/s of a fresh server, and after the faults", f"{fresh}, {after}", "", ""])
        rows.append(
            ["tokens/s after the faults / fresh", ratio, SPEED_GOAL, verdict(float(ratio.split()[0]) >= SPEED_GOAL)]
        )
    print_table(["what", "value", "goal", ""], rows)


def memory_growth(samples: Sequence[int]) -> float:
    """Median of the last quarter / median of the second: the first quarter is warm-up."""
    quarter = len(samples) // 4
    return statistics.median(samples[-quarter:]) / statistics.median(samples[quarter : 2 * quarter])


def _fault_rows(name: str, injected: Sequence[Injected]) -> list[Sequence[object]]:
    """The rows of the faults of one kind: how fast they were noticed, and when the server was ready again."""
    rows: list[Sequence[object]] = []
    noticed = [each.noticed_seconds for each in injected if each.noticed_seconds is not None]
    recovered = [each.recovered_seconds for each in injected if each.recovered_seconds is not None]
    goal = NOTICE_GOALS.get(injected[0].fault.kind)
    label = f"{name}: {len(injected)} times, noticed after"
    if noticed:
        met = verdict(max(noticed) <= goal) if goal is not None and len(noticed) == len(injected) else ""
        rows.append([label, _middle_and_most(noticed), "" if goal is None else f"{goal:g} s", met])
    else:
        rows.append([label, "never", "", ""])
    rows.append([f"{name}: ready again after", _middle_and_most(recovered) if recovered else "never", "", ""])
    return rows


def _middle_and_most(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.3f} s (at most {max(seconds):.3f} s)"


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Faults under load.", usage="python -m benchmarks.faults [options] [-- options of inflight serve]"
    )
    parser.add_argument("--fault", choices=[*FAULTS, "none"], action="append", help="may be repeated [none]")
    parser.add_argument(
        "--target", choices=list(TARGETS), default="rank", help="what sigkill and sigstop hit [%(default)s]"
    )
    parser.add_argument("--all", action="store_true", help="every fault of a rank; needs two ranks")
    parser.add_argument("--times", type=int, default=1, help="how often each fault happens [%(default)s]")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the random requests, processes and moments [%(default)s]"
    )
    parser.add_argument("--clients", type=int, default=8, help="[%(default)s]")
    parser.add_argument("--requests", type=int, default=100, help="requests of each client [%(default)s]")
    parser.add_argument("--max-tokens", type=int, default=64, help="most output tokens of a request [%(default)s]")
    parser.add_argument("--seconds", type=float, default=0.0, help="repeat the load for this time")
    parser.add_argument("--chaos", type=float, metavar="SECONDS", help="hit any process for this time")
    parser.add_argument(
        "--memory-factor",
        type=float,
        metavar="FACTOR",
        help="with --chaos: limit memory to so many times what is needed",
    )
    parser.add_argument("--oversubscribe", type=int, default=0, help="busy processes per core [%(default)s]")
    parser.add_argument(
        "--steady-tokens", type=int, default=256, help="output tokens of a steady request; 0: none [%(default)s]"
    )
    parser.add_argument(
        "--compare-off", action="store_true", help="only measure what fault tolerance costs without faults"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the steady load [%(default)s]")
    parser.add_argument("--log", action="store_true", help="print the server's log, too")
    parser.add_argument("options", nargs="*", help="of inflight serve, after --")
    args = parser.parse_args()
    if args.memory_factor is not None and (args.chaos is None or args.memory_factor < 1):
        parser.error("--memory-factor is at least 1, and goes with --chaos")
    kinds = list(FAULTS) if args.all else [kind for kind in args.fault or [] if kind != "none"]
    faults = [Fault(kind, args.target) for kind in kinds for _ in range(args.times)]
    random.Random(args.seed).shuffle(faults)
    plan = Plan(
        faults=faults, options=args.options, num_clients=args.clients, num_requests=args.requests, max_tokens=args.max_tokens,
        seed=args.seed, seconds=args.chaos or args.seconds, is_chaos=args.chaos is not None,
        memory_factor=args.memory_factor, oversubscribe=args.oversubscribe,
        steady_tokens=args.steady_tokens, steady_rounds=args.rounds,
    )  # fmt: skip
    if args.compare_off:
        row = compare_off(plan)
        print_table(["tokens/s", "off", "on", f"on / off, goal {SPEED_GOAL_ON}"], [row])
        return
    if plan.is_chaos:
        result, chaos = run_chaos(plan)
        if args.log:
            print(result.log)
        sys.exit(not report_chaos(plan, result, chaos))
    result = run(plan)
    if args.log:
        print(result.log)
    report(plan, result)
    if result.problems(plan):
        sys.exit(1)


if __name__ == "__main__":
    main()
