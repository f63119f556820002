"""Ollama's HTTP interface (/api/...)."""
