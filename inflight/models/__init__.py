"""The decoder that all model families share, and the registry of families."""
