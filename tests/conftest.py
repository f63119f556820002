"""Settings of every test run: threads, hypothesis profiles, and which of the marked tests run.

Nothing here imports torch: a run of control-plane tests alone must not load it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests import python_process
from tests.python_process import shared_imports
from tests.triton_interpreter import mend_triton_interpreter

FULL = os.environ.get("INFLIGHT_TEST_FULL") == "1"
FULL_GPU = FULL or os.environ.get("INFLIGHT_TEST_FULL_GPU") == "1"  # see scripts/full_gpu_tests
XDIST_WORKER = "PYTEST_XDIST_WORKER" in os.environ

if not Path("/dev/nvidiactl").exists() or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel's module is imported

if XDIST_WORKER:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # processes share the cores; read by torch when it is imported

# A slow machine is no failure, and what `make test` says does not depend on chance or on an earlier run.
_EVERY_PROFILE = hypothesis.settings(
    deadline=None, database=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("ci", parent=_EVERY_PROFILE, derandomize=True, max_examples=60)
hypothesis.settings.register_profile("full", parent=_EVERY_PROFILE, derandomize=False, max_examples=400)
hypothesis.settings.load_profile("full" if FULL else "ci")


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_full = pytest.mark.skip(reason="big counts: make test-full")
    skip_gpu = pytest.mark.skip(reason="needs a CUDA device")
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_cuda():
        for item in gpu_items:
            item.add_marker(skip_gpu)
    for item in items:
        if (item.get_closest_marker("full") and not FULL) or (item.get_closest_marker("full_gpu") and not FULL_GPU):
            item.add_marker(skip_full)


def pytest_collection_finish() -> None:
    """Torch may have been imported before OMP_NUM_THREADS was set: by a plugin, or by the process that forked us."""
    if XDIST_WORKER and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
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
