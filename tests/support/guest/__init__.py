"""The C++ kernels of another processor, computed by an emulator."""
