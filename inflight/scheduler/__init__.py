"""Which tokens are computed in which step. Torch-free."""
