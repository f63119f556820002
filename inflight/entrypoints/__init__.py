"""What users call: `LLM`, the command line and the server."""
