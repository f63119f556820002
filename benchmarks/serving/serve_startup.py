"""From the command to the first answers of `inflight serve`: /live and /ready. Fresh processes, files in the page cache.

    python -m benchmarks.serve_startup [--model FOLDER] [--rounds 7] [--api-server-count 1]

Medians over rounds; the goals are those of the embedded model. The phases are the server's own, from its log.
"""

from __future__ import annotations

import argparse
import http.client
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict

from benchmarks.shared.free_port import free_port
from benchmarks.shared.report import emit, print_table, verdict

GOALS_S = {"/live": 1.0, "/ready": 4.0}
POLL_SECONDS = 0.01
MAX_SECONDS = 300.0
PROGRAM = "from inflight.entrypoints.cli.main import main; main()"
_PHASE = re.compile(r"ready: .* after [\d.]+ s: (.*)")


def measure(options: list[str]) -> dict[str, float]:
    """Seconds to each answer, and of each phase."""
    port = free_port()
    command = [sys.executable, "-c", PROGRAM, "serve", "--port", str(port), "--access-log", "off", *options]
    with tempfile.TemporaryFile("w+") as log:
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=log, stderr=log) as process:
            try:
                found = {path: _wait_for(process, port, path, start) for path in GOALS_S}
            finally:
                process.send_signal(signal.SIGTERM)
        log.seek(0)
        phases = _PHASE.search(log.read())
    assert phases is not None, "the server logs its phases once it is ready"
    for part in phases[1].split(", "):
        name, _, seconds = part.rpartition(" ")
        found[name] = float(seconds)
    return found


def _wait_for(process: subprocess.Popen[bytes], port: int, path: str, start: float) -> float:
    while time.perf_counter() - start < MAX_SECONDS:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with exit code {process.returncode}")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=MAX_SECONDS)
        try:
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return time.perf_counter() - start
        except ConnectionError:
            pass
        finally:
            connection.close()
        time.sleep(POLL_SECONDS)
    raise SystemExit(f"{path} did not answer within {MAX_SECONDS:g} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder, GGUF file or hub id [the embedded one]")
    parser.add_argument("--rounds", type=int, default=7, help="fresh processes [%(default)s]")
    parser.add_argument("--api-server-count", type=int, default=1, help="front ends [%(default)s]")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds must be 1 or more")
    os.environ["INFLIGHT_LOG_LEVEL"] = "INFO"
    options = [*(["--model", args.model] if args.model else []), "--api-server-count", str(args.api_server_count)]
    found: dict[str, list[float]] = defaultdict(list)
    for index in range(args.rounds + 1):
        seconds = measure(options)
        if index == 0:  # brings the files into the page cache
            continue
        for name, value in seconds.items():
            found[name].append(value)
        emit(benchmark="serve_startup", round=index, **{name: round(value, 3) for name, value in seconds.items()})
    rows = []
    for name, values in found.items():
        median = statistics.median(values)
        goal = GOALS_S.get(name)
        shown = ["", ""] if goal is None else [f"{goal:g}", verdict(median < goal)]
        rows.append([name, f"{median:.2f}", f"{min(values):.2f}", f"{max(values):.2f}", *shown])
    print_table(["until, or phase", "median s", "min", "max", "goal", ""], rows)


if __name__ == "__main__":
    main()
