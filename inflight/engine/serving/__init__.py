"""Many callers at once: `AsyncLLM`, its engines (replicas), and which requests they get."""
