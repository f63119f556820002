"""Parsers of what models write: tool calls and reasoning, by model family, incremental."""
