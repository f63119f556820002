"""Kernels for GPUs, in Triton. Imported only if the device is a GPU, or if Triton's interpreter replaces it."""
