"""Storage for KV blocks outside of the arena: the tiers below host memory. Imports no torch."""
