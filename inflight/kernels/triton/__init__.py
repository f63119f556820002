"""Kernels for GPUs, in Triton. Imported only if the device is a GPU, or if Triton's interpreter replaces it."""

import os

# Triton fuses multiplications with additions. From Triton 3.10 on this is no longer the default, and then results would have
# other bits, and take longer. Each compilation reads this variable.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
