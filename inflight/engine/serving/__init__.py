"""Serves many callers at once: `AsyncLLM`, its engines (replicas), and the choice of an engine for each request."""
