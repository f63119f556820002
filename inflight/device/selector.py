"""`get_device`: creates the device of a rank."""

from inflight.device.base import Device
from inflight.device.cpu import CpuDevice
from inflight.errors import ConfigError


def get_device(kind: str, index: int = 0) -> Device:
    """Returns a new device for a rank. `kind` is "cpu" or "cuda". With "cuda", the device is the GPU with the number `index`.

    Raises:
        ConfigError: the device does not exist.
    """
    if kind == "cpu":
        return CpuDevice()
    if kind == "cuda":
        from inflight.device.cuda import CudaDevice

        return CudaDevice(index)
    raise ConfigError(f"device is {kind!r}; use 'cpu', 'cuda', or 'auto' for the best one here")
