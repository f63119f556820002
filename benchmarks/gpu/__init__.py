"""What `scripts/gpu_check` measures on a GPU: ceilings, decode, prefill, idle time, kernels, formats, and transformers."""
