"""The building blocks of a decoder: each owns its weights, knows its checkpoint names, and shards by its group."""
