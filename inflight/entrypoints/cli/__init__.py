"""The `inflight` command: generate, chat, bench and env. Nothing heavy is imported before a command runs."""
