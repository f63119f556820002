"""Compute threads: one pool, each thread on its core, none of them busy while there is nothing to compute."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from inflight import LLM, SamplingParams
from tests.support.instruction_sets import INSTRUCTION_SETS_HERE
from tests.support.model_zoo import FAMILY_CONFIGS, write_model

needs_kernels = pytest.mark.skipif(not INSTRUCTION_SETS_HERE, reason="the C++ kernels are not here")
needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core only")

# it ends by itself if the test is killed
BUSY = "import time; end = time.monotonic() + 30\nwhile time.monotonic() < end: pass"
PROGRAM = """
import json, os, subprocess, sys, threading, time
from inflight import LLM, SamplingParams

folder, cores, arguments = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
os.sched_setaffinity(0, cores)  # as taskset does
import torch  # what it starts itself is there before

def tasks():
    return {int(task) for task in os.listdir("/proc/self/task")}

before = tasks()
with LLM(folder, skip_tokenizer_init=True, max_model_len=512, kv_cache_memory_bytes=1 << 24, **arguments) as llm:
    params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=3, prompt_logprobs=2, temperature=0.7)
    llm.generate([[5] * 300, [7] * 40], params, use_tqdm=False)
    time.sleep(0.05)
    idle = []
    for program in ("import time; time.sleep(30)", sys.argv[4]):
        beside = subprocess.Popen([sys.executable, "-c", program])
        seconds = []
        while not seconds or (seconds[-1] >= 0.002 and len(seconds) < 10):  # something that is late may cost once
            start = time.process_time()
            time.sleep(0.5)
            seconds.append(time.process_time() - start)
        idle.append(min(seconds))
        beside.kill()
        beside.wait()
    of_python = {thread.native_id for thread in threading.enumerate()} - before
    pool = tasks() - before - of_python
    print(json.dumps({
        "idle": idle,
        "pool": sorted(sorted(os.sched_getaffinity(task)) for task in pool),
        "python": sorted(sorted(os.sched_getaffinity(task)) for task in of_python),
        "main": sorted(os.sched_getaffinity(0)),
    }))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(FAMILY_CONFIGS["llama"][0], tmp_path_factory.mktemp("threads") / "model", seed=0)


def run(folder: Path, cores: list[int], **arguments: object) -> dict[str, Any]:
    """What the threads of a process with an engine look like after it has served, and become idle."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "INFLIGHT_CPU"))
    }
    command = [sys.executable, "-c", PROGRAM, str(folder), json.dumps(cores), json.dumps(arguments), BUSY]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@needs_kernels
@needs_two_cores
def test_one_pool_bound_and_idle(folder: Path) -> None:
    _, second = cores = sorted(os.sched_getaffinity(0))[:2]
    found = run(folder, cores)
    assert found["pool"] == [[second]], "one thread beside the compute thread, on its core"
    assert found["python"] == [cores] * len(found["python"]) and found["main"] == cores
    assert max(found["idle"]) < 0.002, "CPU seconds in half a second: alone, and beside a busy process"


def tasks() -> set[int]:
    """The threads of this process."""
    return {int(task) for task in os.listdir("/proc/self/task")}


@contextmanager
def interrupted(threads: set[int]) -> Iterator[None]:
    """Beside a busy process, these threads are moved from core to core all the time, so they are stopped at any point."""

    def move() -> None:
        rng, cores = random.Random(0), sorted(os.sched_getaffinity(0))
        while not has_ended.wait(0.0005):
            with suppress(ProcessLookupError):
                os.sched_setaffinity(rng.choice(sorted(threads)), [rng.choice(cores)])

    has_ended, mover = threading.Event(), threading.Thread(target=move)
    busy = subprocess.Popen([sys.executable, "-c", BUSY])
    mover.start()
    try:
        yield
    finally:
        has_ended.set()
        mover.join()
        busy.kill()
        busy.wait()


@needs_kernels
def test_threads_that_are_stopped_and_moved_compute_the_same_bits(folder: Path) -> None:
    params = SamplingParams(max_tokens=16, ignore_eos=True, logprobs=3, prompt_logprobs=2, temperature=0.7, seed=3)
    arguments = {"skip_tokenizer_init": True, "max_model_len": 512, "kv_cache_memory_bytes": 1 << 24}
    found = []
    for num_threads in (1, 3):
        before = tasks()
        with LLM(str(folder), num_threads=num_threads, cpu_threads_bind="off", **arguments) as llm:
            disturbance = interrupted(tasks() - before) if num_threads > 1 else nullcontext()
            with disturbance:
                outputs = llm.generate([[5] * 300, [7] * 40], params, use_tqdm=False)
        found.append([(output.outputs[0], output.prompt_logprobs) for output in outputs])
    assert found[0] == found[1]


@pytest.mark.full
@needs_kernels
@needs_two_cores
def test_the_cores_are_chosen(folder: Path) -> None:
    first, second = cores = sorted(os.sched_getaffinity(0))[:2]
    assert run(folder, cores, cpu_threads_bind="off")["pool"] == [cores]
    assert run(folder, cores, cpu_threads_bind=f"{second},{first}")["pool"] == [[first]]
    # beside other programs, "auto" would let the threads of these ranks leave their cores
    ranks = run(
        folder, cores, tensor_parallel_size=2, distributed_executor_backend="uni", cpu_threads_bind=f"{first}|{second}"
    )
    assert ranks["pool"] == [] and ranks["python"].count([first]) == ranks["python"].count([second]) == 1
    with pytest.raises(AssertionError, match=f"ConfigError: .*core {max(cores) + 1}"):
        run(folder, cores, cpu_threads_bind=f"{first},{max(cores) + 1}")


@pytest.mark.full
def test_a_mask_of_one_core_has_no_pool(folder: Path) -> None:
    found = run(folder, [max(os.sched_getaffinity(0))])
    assert found["pool"] == []
    assert max(found["idle"]) < 0.002
