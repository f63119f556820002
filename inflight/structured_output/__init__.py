"""Grammars constrain the text of a request: for each position they give a bitmask of the allowed tokens. This package does not
import torch."""
