"""Settings of every test run: threads, hypothesis profiles, and which of the marked tests run.

Nothing here imports torch: a run of control-plane tests alone must not load it.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import logging
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

import hypothesis
import pytest

from tests.case_groups import CaseGroups
from tests.skipped_cases import keep_one_of_each, reason_of_marks
from tests.spread import spread
from tests.support import python_process
from tests.support.python_process import shared_imports
from tests.support.ray_cluster import shared_cluster
from tests.support.triton_interpreter import mend_triton_interpreter

EVEN_LATER = 60.0  # seconds after the time limit of a test
ENDING_SECONDS = 300.0  # a thread that was told to end has ended by then, however slow the machine is
_STDERR = pytest.StashKey[int]()
FULL = os.environ.get("INFLIGHT_TEST_FULL") == "1"
FULL_GPU = FULL or os.environ.get("INFLIGHT_TEST_FULL_GPU") == "1"  # see scripts/full_gpu_tests
XDIST_WORKER = "PYTEST_XDIST_WORKER" in os.environ

if not Path("/dev/nvidiactl").exists() or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel's module is imported

# Read by torch when it is imported. Processes share the cores, and tested servers are started with this value: another one here
# would make each of their processes a new interpreter.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests keep no packed weights in the user's cache. Those of the cache switch it on, in a folder of their own.
os.environ["INFLIGHT_WEIGHT_CACHE"] = "off"

# A slow machine is no failure, and what `make test` says does not depend on chance or on an earlier run.
_EVERY_PROFILE = hypothesis.settings(
    deadline=None, database=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("ci", parent=_EVERY_PROFILE, derandomize=True, max_examples=60)
hypothesis.settings.register_profile("full", parent=_EVERY_PROFILE, derandomize=False, max_examples=400)
hypothesis.settings.load_profile("full" if FULL else "ci")


class EveryRunEnds:
    """Names what crashed, hung, or was still running when the run was ended. For the process that starts the workers.

    pytest-timeout fails a test that hangs (`timeout` in pyproject.toml). If it hangs where no signal handler runs, in a kernel
    for example, `EVEN_LATER` ends its process. pytest-xdist then starts another worker. With --dist loadfile or loadgroup
    the rest of the file would be lost, and the run would wait for ever.
    """

    def __init__(self) -> None:
        self._running: dict[str, float] = {}
        self._broken: list[str] = []

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        text = report.longreprtext if report.failed else ""
        if "crashed while running" in text:
            self._broken.append(f"{report.nodeid} crashed its process")
            self._running.pop(report.nodeid, None)  # its end is not reported
        elif "pytest-timeout" in text:
            self._broken.append(f"{report.nodeid} hung")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        now = time.monotonic()
        running = [f"{test} had been running for {now - start:.0f} s" for test, start in self._running.items()]
        for line in [*self._broken, *running]:
            sys.stderr.write(f"ended badly: {line}\n")


class Durations:
    """Writes the seconds of each test file to the file that INFLIGHT_TEST_DURATIONS names (docs/testing.md)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        rounded = {name: round(seconds, 1) for name, seconds in sorted(self._seconds.items())}
        self._path.write_text(json.dumps(rounded, indent=1) + "\n")


def durations() -> dict[str, float]:
    """Name of a test file -> seconds. Empty where the file is missing: on a machine for GPU tests, for example."""
    path = Path(__file__).with_name("durations.json")
    found: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    return found


def pytest_configure(config: pytest.Config) -> None:
    if XDIST_WORKER:
        config.stash[_STDERR] = os.dup(2)  # not captured at this moment
        gc.disable()  # until all tests are collected: imported modules stay, so there is little to collect
        if not config.option.keyword and not any("::" in argument for argument in config.args):
            config.pluginmanager.register(CaseGroups(durations()))
        return
    config.pluginmanager.register(EveryRunEnds())
    if path := os.environ.get("INFLIGHT_TEST_DURATIONS"):
        config.pluginmanager.register(Durations(Path(path)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Ends the process if the test hangs and pytest-timeout cannot fail it."""
    stderr = item.config.stash.get(_STDERR, None)
    if stderr is None:
        return (yield)
    marker = item.get_closest_marker("timeout")
    seconds = float(marker.args[0] if marker else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(seconds + EVEN_LATER, exit=True, file=stderr)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Each process imports its share of the test files before it collects all of them. So each file is compiled by one process,
    and the others read the compiled code from the cache. Errors are shown when the file is collected."""
    if not XDIST_WORKER:
        return
    number, count = int(os.environ["PYTEST_XDIST_WORKER"][2:]), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    root = session.config.rootpath
    asked_for = [session.config.invocation_params.dir / argument.partition("::")[0] for argument in session.config.args]
    files = [file for path in asked_for for file in (sorted(path.rglob("test_*.py")) if path.is_dir() else [])]
    for file in files[number::count]:
        with suppress(BaseException):
            importlib.import_module(".".join(file.relative_to(root).with_suffix("").parts))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    has_cuda = not any(item.get_closest_marker("gpu") for item in items) or _has_cuda()

    def reason_of(item: pytest.Item) -> str:
        if item.get_closest_marker("gpu") and not has_cuda:
            return "needs a CUDA device"
        if (item.get_closest_marker("full") and not FULL) or (item.get_closest_marker("full_gpu") and not FULL_GPU):
            return "big counts: make test-full"
        return reason_of_marks(item)

    items[:] = keep_one_of_each(items, reason_of)
    if XDIST_WORKER:
        named = [(item.nodeid.partition("::")[0], item) for item in items]
        items[:] = spread(named, durations(), int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))


def pytest_collection_finish() -> None:
    if "torch" in sys.modules:  # it may have been imported before OMP_NUM_THREADS was set: by a plugin
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if XDIST_WORKER:
        gc.freeze()  # a full collection that visits all modules takes half a second
        gc.enable()
    mend_triton_interpreter()


@pytest.fixture(scope="session", autouse=True)
def _shared_imports() -> Iterator[None]:
    with shared_imports():
        yield


@pytest.fixture
def new_interpreters() -> Iterator[None]:
    """For tests of how processes start: they start as users' processes do."""
    with python_process.new_interpreters():
        yield


@pytest.fixture(scope="module")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The Ray cluster of this test run, which engines find by RAY_ADDRESS."""
    folder = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", shared_cluster(folder.parent if XDIST_WORKER else folder))
        # a busy machine may need long to start Ray's processes
        patch.setattr("inflight.executor.ray_executor.MAX_PLACEMENT_SECONDS", 200.0)
        patch.setattr("inflight.executor.ray_executor.MAX_ANSWER_SECONDS", 250.0)
        yield


@pytest.fixture(scope="module", autouse=True)
def _no_thread_outlives_its_module() -> Iterator[None]:
    """Other tests check that they leave no thread. So a thread that a module leaves is an error of this module."""

    def running() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("inflight-")}

    before = running()
    yield
    end = time.monotonic() + ENDING_SECONDS
    while (left := running() - before) and time.monotonic() < end:
        time.sleep(0.01)
    assert not left, f"the tests of this module left these threads: {sorted(thread.name for thread in left)}"


@pytest.fixture(autouse=True)
def _same_random_numbers_in_every_run() -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def _log_level_stays() -> Iterator[None]:
    """Commands that a test runs in this process set it; workers that a later one starts would take it over."""
    logger = logging.getLogger("inflight")
    level = logger.level
    yield
    logger.setLevel(level)
