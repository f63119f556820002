"""The control plane's side of the KV cache: which block holds what, and for whom. Torch-free."""
