"""`EngineProcess`: an engine in a process of its own that is stopped (SIGSTOP) whenever it is not its turn.

So what waits takes no core from what runs, whether it would spin or not.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

from benchmarks.compare.driver import Settings
from benchmarks.compare.engines import Engine
from inflight.entrypoints.cli.workloads import Workload

EXIT_SECONDS = 10.0
SETTLE_SECONDS = 0.3  # an engine that plans ahead may have one step more under way when its answer is complete
THREAD_COUNT_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # each engine takes all cores


@dataclass(frozen=True, kw_only=True)
class Startup:
    """Seconds: from the process's start to its imports, on to the constructor's end, on to the first token."""

    imports: float
    constructor: float
    first_token: float

    @property
    def total(self) -> float:
        return self.imports + self.constructor + self.first_token


class EngineProcess:
    """A context manager; entering it loads the model, leaving it ends the process and what it has started.

    Raises:
        SystemExit: the engine ended before it answered.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine = engine
        command = [str(engine.python), "-m", f"benchmarks.compare.drivers.{engine.name}", json.dumps(asdict(settings))]
        environment = {name: value for name, value in os.environ.items() if name not in THREAD_COUNT_VARIABLES}
        started_at = time.monotonic()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=engine.checkout,
            env=environment,
            process_group=0,  # of this session: should the parent die, the kernel wakes and hangs up what is stopped
        )
        try:
            ready = self._reply()
        except BaseException:  # an interrupt, too
            self.close(at_once=True)
            raise
        self._stop()
        self.startup = Startup(
            imports=ready["imported_at"] - started_at,
            constructor=ready["constructed_at"] - ready["imported_at"],
            first_token=ready["first_token_at"] - ready["constructed_at"],
        )

    def run(self, workload: Workload) -> float:
        """Tokens per second, as the workload counts them."""
        reply = self._ask(json.dumps({"prompts": workload.prompts(), "output_len": workload.output_len}))
        expected = workload.batch_size * workload.output_len
        if reply["num_tokens"] != expected:
            raise SystemExit(
                f"{self.engine.label} produced {reply['num_tokens']} tokens of {expected} in {workload.name}"
            )
        seconds: float = reply["seconds"]
        return workload.num_counted_tokens / seconds

    def peak_bytes(self) -> int:
        """The most memory that the process (not those it has started) has had resident."""
        peak: int = self._ask("")["peak_bytes"]
        return peak

    def close(self, *, at_once: bool = False) -> None:
        if at_once:
            self._signal(signal.SIGKILL)
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_SECONDS)
        self._signal(signal.SIGKILL)  # what is left of the group
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(at_once=kind is not None)

    def _ask(self, line: str) -> dict[str, Any]:  # Any: JSON
        assert self._process.stdin is not None
        with self._turn():
            try:
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                pass  # `_reply` says it better
            return self._reply()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._stop()

    def _stop(self) -> None:
        time.sleep(SETTLE_SECONDS)
        self._signal(signal.SIGSTOP)

    def _reply(self) -> dict[str, Any]:  # Any: JSON
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.engine.label} ended with {self._process.wait()}; its errors are above")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
