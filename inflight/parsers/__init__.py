"""Incremental parsers, one per model family, that find tool calls and reasoning in the text of a model."""
