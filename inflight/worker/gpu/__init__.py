"""The runner of a GPU: a step without a wait for the device (docs/architecture.md, "A step on a GPU")."""
