"""Kernels for GPUs, in Triton. Imported only where the device is one, or Triton's interpreter stands in for it."""
