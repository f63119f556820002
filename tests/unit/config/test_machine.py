"""`detect_machine`: what "auto" takes, and what "cuda" says when it cannot be had."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import replace

import pytest

from inflight.config.cuda_driver import CudaFacts
from inflight.config.machine import Machine, detect_machine
from inflight.errors import ConfigError
from tests.unit.config.fake_driver import A100, H200, V100, facts


def no_driver() -> CudaFacts:
    raise ConfigError("there is no NVIDIA driver: x; install it")


def detect(device: str, found: CudaFacts) -> Machine:
    return detect_machine(device, read_facts=lambda: found)


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_gpus_that_can_be_used_are(device: str) -> None:
    machine = detect(device, facts(H200, A100, packages=("triton",)))
    assert (machine.device, machine.gpus) == ("cuda", (H200, A100))
    assert machine.dtypes == ("bfloat16", "float16", "float32")
    assert machine.compute_capability == (8, 0)
    assert machine.usable_cores == tuple(sorted(os.sched_getaffinity(0)))


def test_a_gpu_that_is_too_old_hides_those_behind_it() -> None:
    machine = detect("cuda", facts(H200, V100, A100))
    assert (machine.gpus, machine.compute_capability) == ((H200,), (9, 0))


def test_drivers_serve_older_and_other_minor_versions() -> None:
    for driver, torch_cuda in (((13, 0), (12, 8)), ((12, 2), (12, 8)), ((13, 1), (13, 0))):
        assert detect("auto", facts(H200, driver=driver, torch_cuda=torch_cuda)).device == "cuda"


GOOD = facts(H200)
UNUSABLE = [
    (
        facts(V100),
        r"GPU 0, Tesla V100, has compute capability 7\.0, and at least 8\.0 .* is needed; .*CUDA_VISIBLE_DEVICES.*device='cpu'",
    ),
    (replace(GOOD, torch_cuda=None), r"torch that is installed is a build without CUDA; .*for CUDA 13 at most"),
    (
        replace(GOOD, driver=(12, 8)),
        r"the driver supports CUDA 12\.8 at most, but torch was built for 13\.0: update the driver to one for CUDA 13, or "
        r"install a torch for CUDA 12",
    ),
    (replace(GOOD, packages=frozenset()), "package triton: pip install triton"),
]


@pytest.mark.parametrize(("found", "message"), UNUSABLE)
def test_what_cuda_says_when_it_cannot_be_had(found: CudaFacts, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^device='cuda', but .*{message}"):
        detect("cuda", found)


@pytest.mark.parametrize(("found", "message"), UNUSABLE)
def test_auto_is_then_the_cpu(found: CudaFacts, message: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="inflight"):
        machine = detect("auto", found)
    assert (machine.device, machine.dtypes, machine.gpus) == ("cpu", ("bfloat16", "float32"), ())
    assert [record.levelname for record in caplog.records] == ["DEBUG"]
    assert re.search(f"device='auto' is the CPU: .*{message}", caplog.records[0].getMessage())


def test_no_driver() -> None:
    machine = detect_machine("auto", read_facts=no_driver)
    assert (machine.device, machine.gpus, machine.compute_capability) == ("cpu", (), (0, 0))
    with pytest.raises(ConfigError, match=r"^device='cuda'"):
        detect_machine("cuda", read_facts=no_driver)


def test_nobody_asks_the_driver_for_a_cpu() -> None:
    def asked() -> CudaFacts:
        raise AssertionError("the driver was asked")

    assert detect_machine("cpu", read_facts=asked).device == "cpu"


def test_the_environment_says_where_threads_of_a_cpu_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("INFLIGHT_CPU_THREADS_BIND", "0-1")
    monkeypatch.setenv("OMP_PLACES", "cores")
    assert detect("cuda", GOOD).threads_bind == "auto"
    assert not caplog.records, "OpenMP's places are no matter on a GPU"
    assert detect("cpu", GOOD).threads_bind == "0-1"
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "OMP_PLACES" in caplog.text


@pytest.mark.parametrize(("wanted", "num_cores"), [("1", 1), ("100000", len(os.sched_getaffinity(0)))])
def test_the_threads_of_a_machine_with_gpus_are_limited_too(
    monkeypatch: pytest.MonkeyPatch, wanted: str, num_cores: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", wanted)
    monkeypatch.setattr("inflight.config.machine.cpu_quota", lambda: None)
    assert detect("cuda", GOOD).num_cores == num_cores
