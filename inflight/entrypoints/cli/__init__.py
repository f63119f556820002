"""The command `inflight`. Nothing that is slow to import is loaded before a command runs."""
