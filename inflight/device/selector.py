"""Which device a rank runs on."""

from __future__ import annotations

from inflight.device.base import Device
from inflight.device.cpu import CpuDevice
from inflight.errors import ConfigError


def get_device(kind: str) -> Device:
    """A new device of `kind`: "cpu", or "auto" for the best one here. Raises `ConfigError` for any other."""
    if kind in ("auto", "cpu"):
        return CpuDevice()
    raise ConfigError(f"device is {kind!r}; this version serves 'cpu', and 'auto' chooses it: use one of the two")
