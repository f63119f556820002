"""The control plane's side of the KV cache: which requests use which blocks, and what is cached. Imports no torch."""
