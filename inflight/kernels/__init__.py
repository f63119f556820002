"""Kernels for CPUs and GPUs, and the plain formulas that they are tested against."""
