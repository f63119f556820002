"""Grammars: what the text of a request must look like, as one bitmask of allowed tokens per position. Torch-free."""
