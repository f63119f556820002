"""Anthropic's HTTP interface (/v1/messages)."""
