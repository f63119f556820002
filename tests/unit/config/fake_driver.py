"""A stand-in for libcuda.so.1: it writes to the addresses it is given, as the C functions do."""

from __future__ import annotations

import ctypes
from typing import Any

from inflight.config.cuda_driver import CudaFacts, Gpu, Version

H200 = Gpu(name="NVIDIA H200", compute_capability=(9, 0), num_multiprocessors=132, total_memory_bytes=150_110_863_360)
A100 = Gpu(name="NVIDIA A100", compute_capability=(8, 0), num_multiprocessors=108, total_memory_bytes=85_899_345_920)
V100 = Gpu(name="Tesla V100", compute_capability=(7, 0), num_multiprocessors=80, total_memory_bytes=17_179_869_184)


def facts(
    *gpus: Gpu, driver: Version = (13, 0), torch_cuda: Version | None = (13, 0), packages: tuple[str, ...] = ("triton",)
) -> CudaFacts:
    return CudaFacts(driver=driver, gpus=gpus, torch_cuda=torch_cuda, packages=frozenset(packages))


class FakeDriver:
    """`failing`: what a function returns instead of 0. Attributes are numbered as in cuda.h."""

    def __init__(self, *gpus: Gpu, version: int = 13000, failing: dict[str, int] | None = None) -> None:
        self.gpus, self.version, self.failing = gpus, version, failing or {}
        self.calls: list[str] = []

    def open(self, name: str) -> Any:
        assert name == "libcuda.so.1"
        return self

    def _do(self, function: str) -> int:
        self.calls.append(function)
        assert function == "cuInit" or "cuInit" in self.calls, f"{function} before cuInit"
        return self.failing.get(function, 0)

    def cuInit(self, flags: ctypes.c_uint) -> int:  # noqa: N802 as in cuda.h, here and below
        assert flags.value == 0
        return self._do("cuInit")

    def cuDriverGetVersion(self, out: Any) -> int:  # noqa: N802
        out._obj.value = self.version
        return self._do("cuDriverGetVersion")

    def cuDeviceGetCount(self, out: Any) -> int:  # noqa: N802
        out._obj.value = len(self.gpus)
        return self._do("cuDeviceGetCount")

    def cuDeviceGet(self, out: Any, ordinal: ctypes.c_int) -> int:  # noqa: N802
        out._obj.value = 1000 + ordinal.value  # a handle is no ordinal
        return self._do("cuDeviceGet")

    def cuDeviceGetName(self, out: Any, size: ctypes.c_int, device: ctypes.c_int) -> int:  # noqa: N802
        out.value = self._gpu(device).name.encode()[: size.value - 1]
        return self._do("cuDeviceGetName")

    def cuDeviceTotalMem_v2(self, out: Any, device: ctypes.c_int) -> int:  # noqa: N802
        assert isinstance(out._obj, ctypes.c_size_t)
        out._obj.value = self._gpu(device).total_memory_bytes
        return self._do("cuDeviceTotalMem_v2")

    def cuDeviceGetAttribute(self, out: Any, attribute: ctypes.c_int, device: ctypes.c_int) -> int:  # noqa: N802
        gpu = self._gpu(device)
        values = {16: gpu.num_multiprocessors, 75: gpu.compute_capability[0], 76: gpu.compute_capability[1]}
        out._obj.value = values[attribute.value]
        return self._do("cuDeviceGetAttribute")

    def cuGetErrorString(self, result: ctypes.c_int, out: Any) -> int:  # noqa: N802
        out._obj.value = {803: b"system has unsupported display driver / cuda driver combination"}.get(result.value)
        return 0 if out._obj.value else 1

    def _gpu(self, device: ctypes.c_int) -> Gpu:
        return self.gpus[device.value - 1000]
