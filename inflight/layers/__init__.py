"""The building blocks of a decoder: each owns its rank's part of the weights, and knows their names in the checkpoint."""
