"""What happens once, before the first request: model files, the size of the KV cache, the measured times of steps."""
