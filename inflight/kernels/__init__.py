"""Kernels, and the plain truth they are tested against."""
