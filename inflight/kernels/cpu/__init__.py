"""Kernels in C++ for x86-64, one library per instruction set."""
