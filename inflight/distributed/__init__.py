"""Communication between ranks: collectives in groups of ranks, and channels and links between two ranks."""
