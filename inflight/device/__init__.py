"""The seam to the hardware: memory, staged copies and the order in which stages run."""

from inflight.device.base import TORCH_DTYPES, Device
from inflight.device.selector import get_device

__all__ = ["TORCH_DTYPES", "Device", "get_device"]
