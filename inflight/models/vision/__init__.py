"""Vision towers: what makes embeddings of images, in front of a decoder."""
