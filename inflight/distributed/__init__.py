"""Groups of ranks and what they do together."""
