"""`get_device`: the device that a rank runs on."""

from __future__ import annotations

from inflight.device.base import Device
from inflight.device.cpu import CpuDevice
from inflight.errors import ConfigError


def get_device(kind: str, local_rank: int = 0) -> Device:
    """A new device for the rank that is the `local_rank`-th of its machine: "cpu", or "cuda", the GPU of that index.

    Raises:
        ConfigError: there is no such device.
    """
    if kind == "cpu":
        return CpuDevice()
    if kind == "cuda":
        from inflight.device.cuda import CudaDevice  # starts the driver

        return CudaDevice(local_rank)
    raise ConfigError(f"device is {kind!r}; use 'cpu', 'cuda', or 'auto' for the best one here")
