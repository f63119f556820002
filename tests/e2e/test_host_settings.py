"""What the program around an engine has set for itself changes no result, and the engine leaves it as it was.

Most of these settings belong to the whole process or to the thread that calls `LLM`. Another library may change them while the
engine runs: transformers changes torch's default dtype while it loads a model, in whatever thread.
"""

from __future__ import annotations

import contextlib
import gc
import locale
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inflight import LLM, SamplingParams
from inflight.structured_outputs_params import StructuredOutputsParams
from tests.e2e.text_model import text_config, with_tokenizer
from tests.support.model_zoo import FALLBACK_CONFIGS, FAMILY_CONFIGS, VOCAB_SIZE, write_model
from tests.unit.structured_output.grammar_case import PERSON

Result = list[
    tuple[tuple[int, ...], list[dict[int, float]]]
]  # of each prompt: tokens, and the log-probabilities of the best

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, ignore_eos=True)
SEEDED = SamplingParams(
    temperature=1.5,
    seed=7,
    max_tokens=12,
    logprobs=3,
    top_p=0.95,
    structured_outputs=StructuredOutputsParams(json=PERSON, disable_any_whitespace=True),
)
PROMPTS = [[5, 6, 7], [random.Random(1).randrange(3, VOCAB_SIZE) for _ in range(70)]]
_STRUCTURED = text_config(1024)
# name -> (configuration, arguments of LLM, sampling)
CASES: dict[str, tuple[Any, dict[str, Any], SamplingParams]] = {
    "float32": (FAMILY_CONFIGS["llama"][3], {}, GREEDY),
    "int8": (FAMILY_CONFIGS["llama"][0], {"quantization": "int8"}, GREEDY),
    "int4": (FAMILY_CONFIGS["qwen3"][0], {"quantization": "int4"}, GREEDY),
    "longrope": (FAMILY_CONFIGS["phi3"][1], {}, GREEDY),
    "delta rule": (FAMILY_CONFIGS["qwen3_next"][0], {}, GREEDY),
    "short convolutions": (FAMILY_CONFIGS["lfm2"][1], {}, GREEDY),
    "latent attention": (FAMILY_CONFIGS["deepseek_v2"][1], {}, GREEDY),
    "transformers": (FALLBACK_CONFIGS["gemma2"][0], {"model_impl": "transformers"}, GREEDY),
    "grammar": (_STRUCTURED, {"skip_tokenizer_init": False}, SEEDED),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made = {name: write_model(config, root / name.replace(" ", "-"), seed=0) for name, (config, *_) in CASES.items()}
    with_tokenizer(made["grammar"])
    return made


def start(folders: dict[str, Path], case: str, **more: Any) -> LLM:
    defaults = {"dtype": "float32", "max_model_len": 128, "kv_cache_memory_bytes": 1 << 24, "max_num_seqs": 4}
    defaults |= {"enable_prefix_caching": False, "skip_tokenizer_init": True, "generation_config": "none"}
    return LLM(str(folders[case]), **{**defaults, **CASES[case][1], **more})


def generate(llm: LLM, case: str) -> Result:
    outputs = [each.outputs[0] for each in llm.generate(PROMPTS, CASES[case][2], use_tqdm=False)]
    assert all(output.token_ids for output in outputs)
    return [
        (tuple(output.token_ids), [{t: e.logprob for t, e in row.items()} for row in output.logprobs or []])
        for output in outputs
    ]


@pytest.fixture(scope="module")
def engines(folders: dict[str, Path]) -> Iterator[dict[str, LLM]]:
    """Started without any setting."""
    with contextlib.ExitStack() as stack:
        yield {case: stack.enter_context(start(folders, case)) for case in CASES}


@pytest.fixture(scope="module")
def truth(engines: dict[str, LLM]) -> dict[str, Result]:
    return {case: generate(engine, case) for case, engine in engines.items()}


# ---- what a host may set ---------------------------------------------------------------------------------------------


def setting(change: Callable[[Any], object], value: Any, before: Callable[[], Any]) -> AbstractContextManager[None]:
    """A setting that `change` makes and `before` reads."""

    @contextlib.contextmanager
    def inside() -> Iterator[None]:
        old = before()
        change(value)
        try:
            yield
        finally:
            change(old)

    return inside()


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    return setting(torch.set_default_dtype, dtype, torch.get_default_dtype)


@contextlib.contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def num_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def print_options() -> Iterator[None]:
    torch.set_printoptions(precision=1, threshold=3, sci_mode=True)  # type: ignore[no-untyped-call]
    try:
        with np.printoptions(precision=1, threshold=3):
            yield
    finally:
        torch.set_printoptions(profile="default")  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextlib.contextmanager
def decimal_comma() -> Iterator[None]:
    before = locale.setlocale(locale.LC_ALL)
    for name in ("de_DE.UTF-8", "fr_FR.UTF-8", "C.UTF-8"):  # the last one if there is no locale with a comma
        with contextlib.suppress(locale.Error):
            locale.setlocale(locale.LC_ALL, name)
            break
    try:
        yield
    finally:
        locale.setlocale(locale.LC_ALL, before)


@contextlib.contextmanager
def deleted_working_folder(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    folder.mkdir()
    os.chdir(folder)
    folder.rmdir()
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def other_seeds() -> Iterator[None]:
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    yield


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# name -> makes the setting; the argument is a folder that does not exist
SETTINGS: dict[str, Callable[[Path], AbstractContextManager[object]]] = {
    "default dtype float16": lambda _: default_dtype(torch.float16),
    "default dtype bfloat16": lambda _: default_dtype(torch.bfloat16),
    "default dtype float64": lambda _: default_dtype(torch.float64),
    "default device": lambda _: default_device(),
    "device context": lambda _: torch.device("meta"),
    "autocast": lambda _: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference mode": lambda _: torch.inference_mode(),
    "no grad": lambda _: torch.no_grad(),
    "grad": lambda _: torch.enable_grad(),
    "anomaly detection": lambda _: torch.autograd.set_detect_anomaly(True),
    "deterministic algorithms": lambda _: deterministic(),
    "threads": lambda _: num_threads(),
    "products of float32": lambda _: setting(
        torch.set_float32_matmul_precision, "medium", torch.get_float32_matmul_precision
    ),
    "print options": lambda _: print_options(),
    "numpy's errors": lambda _: np.errstate(all="raise"),
    "warnings": lambda _: warnings_are_errors(),
    "locale": lambda _: decimal_comma(),
    "umask": lambda _: setting(os.umask, 0o777, lambda: os.umask(0o777)),
    "working folder": deleted_working_folder,
    "timeouts of sockets": lambda _: setting(socket.setdefaulttimeout, 1e-6, socket.getdefaulttimeout),
    "seeds": lambda _: other_seeds(),
    "garbage collection": lambda _: without_garbage_collection(),
    "log": lambda _: setting(logging.disable, logging.CRITICAL, lambda: logging.NOTSET),
}


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_frozen() -> Iterator[None]:
    """The count of frozen objects falls when one of them is freed; tests/conftest.py has frozen many."""
    gc.unfreeze()
    yield
    gc.freeze()


def settings() -> dict[str, object]:
    """What a host may have set, as it is now in this thread."""
    umask = os.umask(0o022)
    os.umask(umask)
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "anomaly detection": torch.is_anomaly_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "products of float32": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
        "states of random numbers": (
            random.getstate(),
            torch.get_rng_state().tolist(),
            [str(each) for each in np.random.get_state()],
        ),
        "numpy's errors": np.geterr(),
        "print options": (repr(torch.full((3,), 0.125, dtype=torch.float32, device="cpu")), np.get_printoptions()),
        "warnings": list(warnings.filters),
        "locale": locale.setlocale(locale.LC_ALL),
        "umask": umask,
        "working folder": Path("/proc/self/cwd").readlink(),
        "timeouts of sockets": socket.getdefaulttimeout(),
        "environment": dict(os.environ),
        "signals": [signal.getsignal(each) for each in sorted(signal.valid_signals())],
        "garbage collection": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook, sys.getswitchinterval()),
        "recursion": sys.getrecursionlimit(),
        "log": (logging.root.level, [*logging.root.handlers], logging.root.manager.disable),
        "cores": os.sched_getaffinity(0),
    }


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_before_the_start_changes_no_result(
    folders: dict[str, Path], truth: dict[str, Result], name: str, tmp_path: Path
) -> None:
    with SETTINGS[name](tmp_path / "gone"):
        before = settings()
        for case in CASES:
            with start(folders, case) as llm:
                assert generate(llm, case) == truth[case], case
        assert settings() == before


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_between_two_calls_changes_no_result(
    engines: dict[str, LLM], truth: dict[str, Result], name: str, tmp_path: Path
) -> None:
    with SETTINGS[name](tmp_path / "gone"):
        for case, engine in engines.items():
            assert generate(engine, case) == truth[case], case
    for case, engine in engines.items():
        assert generate(engine, case) == truth[case], f"{case}, after the setting was taken back"


def test_a_default_dtype_that_changes_all_the_time_changes_no_result(
    folders: dict[str, Path], truth: dict[str, Result]
) -> None:
    """As if libraries in other threads loaded models. The engine sets no default dtype itself, not even for a moment: another
    thread would get it."""
    ended, foreign = threading.Event(), list[torch.dtype]()

    def change() -> None:
        while not ended.is_set():
            for dtype in (torch.bfloat16, torch.float64, torch.float32):
                torch.set_default_dtype(dtype)
                ended.wait(1e-4)
                if torch.get_default_dtype() != dtype:
                    foreign.append(torch.get_default_dtype())

    changer = threading.Thread(target=change)
    changer.start()
    try:
        for _ in range(2):
            for case in CASES:
                with start(folders, case) as llm:
                    assert generate(llm, case) == truth[case], case
    finally:
        ended.set()
        changer.join()
        torch.set_default_dtype(torch.float32)
    assert not foreign


# ---- what the host has set stays -------------------------------------------------------------------------------------


def test_ranks_that_are_processes_start_under_any_settings(
    folders: dict[str, Path], truth: dict[str, Result], tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        for name in ("default dtype bfloat16", "default device", "umask", "working folder", "timeouts of sockets"):
            stack.enter_context(SETTINGS[name](tmp_path / "gone"))
        more = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
        with start(folders, "float32", **more) as llm:
            found = generate(llm, "float32")
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in truth["float32"]]
    for (_, ours), (_, wanted) in zip(found, truth["float32"], strict=True):  # two ranks add up in another order
        assert all(row == pytest.approx(want, abs=1e-4) for row, want in zip(ours, wanted, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_the_engine_leaves_the_settings_as_they_were(folders: dict[str, Path], case: str) -> None:
    before = settings()
    with start(folders, case) as llm:
        assert settings() == before
        generate(llm, case)
        assert settings() == before
    assert settings() == before


_OPENMP = """
import os, subprocess, sys
from inflight import LLM
def cores(task):
    try:
        return os.sched_getaffinity(int(task))
    except ProcessLookupError:  # the thread has just ended
        return set()
before = {task: cores(task) for task in os.listdir("/proc/self/task")}
with LLM(num_threads=len(os.sched_getaffinity(0)), kv_cache_memory_bytes=1 << 24) as llm:
    assert {task: cores(task) for task in before} == before
    threads = [cores(task) for task in os.listdir("/proc/self/task") if task not in before]
    assert set().union(*threads) == os.sched_getaffinity(0), threads
child = subprocess.run([sys.executable, "-c", "import os; print(len(os.sched_getaffinity(0)))"], capture_output=True)
assert int(child.stdout) == len(os.sched_getaffinity(0))
assert os.environ["OMP_PLACES"] == "cores"
"""


def test_openmp_binds_no_thread_of_the_program() -> None:
    """With these variables OpenMP would bind the thread that imports torch, and with it all threads and processes that this
    thread starts later."""
    placed = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores", "GOMP_CPU_AFFINITY": "0", "OMP_DYNAMIC": "true"}
    limits = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", _OPENMP], env={**limits, **placed}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("OMP_PROC_BIND, OMP_PLACES, GOMP_CPU_AFFINITY, OMP_DYNAMIC: ignored") == 1, done.stderr
