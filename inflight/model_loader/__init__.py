"""From a folder of safetensors, or from a seed, to a model that can run."""
