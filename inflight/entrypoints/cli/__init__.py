"""The command `inflight`. Modules that are slow to import are loaded only when a command runs."""
