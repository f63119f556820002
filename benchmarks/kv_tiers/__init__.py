"""What KV blocks outside of the KV cache bring, and what they cost: in host memory, in files, in Redis, and in a slow tier."""
