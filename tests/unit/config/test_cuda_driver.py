"""What is read from the driver's library and from torch's version.py."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from inflight.config.cuda_driver import read_cuda_facts, read_torch_cuda
from inflight.errors import ConfigError
from tests.unit.config.fake_driver import A100, H200, V100, FakeDriver


def test_every_gpu_is_described() -> None:
    driver = FakeDriver(H200, A100, V100, version=12080)
    facts = read_cuda_facts(driver.open)
    assert facts.gpus == (H200, A100, V100)
    assert facts.driver == (12, 8)
    assert driver.calls[0] == "cuInit"


def test_packages_are_looked_for_and_not_imported() -> None:
    facts = read_cuda_facts(FakeDriver(H200).open)
    assert facts.packages <= {"triton"}
    assert "triton" in facts.packages  # the checks install it


@pytest.mark.parametrize(
    ("driver", "message"),
    [
        (FakeDriver(), "the NVIDIA driver shows no GPU to this process; .*CUDA_VISIBLE_DEVICES"),
        (FakeDriver(H200, failing={"cuInit": 100}), "the NVIDIA driver shows no GPU"),
        (
            FakeDriver(H200, failing={"cuInit": 803}),
            r"cuInit returned 803 \(system has unsupported display driver / cuda driver combination\); .*restart",
        ),
        (FakeDriver(H200, failing={"cuDeviceTotalMem_v2": 999}), r"cuDeviceTotalMem_v2 returned 999 \(unknown\)"),
    ],
)
def test_a_driver_that_shows_no_gpu(driver: FakeDriver, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_cuda_facts(driver.open)


def test_no_driver() -> None:
    def open_library(name: str) -> ctypes.CDLL:
        return ctypes.CDLL(f"{name}.that-is-not-there")

    with pytest.raises(ConfigError, match=r"no NVIDIA driver.*cannot open.*docker run"):
        read_cuda_facts(open_library)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("debug = False\ncuda: Optional[str] = '13.0'\ngit_version = 'x'\n", (13, 0)),
        ("cuda = '12.8'\n", (12, 8)),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.2'\n", None),
        ("__all__ = ['cuda', '13.0']\nfoo_cuda = '1.2'\n", None),
    ],
)
def test_what_torch_was_built_for(tmp_path: Path, text: str, version: tuple[int, int] | None) -> None:
    (tmp_path / "version.py").write_text(text)
    assert read_torch_cuda(tmp_path) == version


def test_it_says_what_torch_itself_says() -> None:
    import torch

    version = torch.version.cuda
    found = read_torch_cuda(Path(torch.__file__).parent)
    assert found == (None if version is None else tuple(map(int, version.split(".")[:2])))
    assert read_cuda_facts(FakeDriver(H200).open).torch_cuda == found
    assert read_torch_cuda(None) is None
