"""The decoder that all model families share."""
